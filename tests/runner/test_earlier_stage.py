"""Pipeline stages before the last: when they wait for sampled tokens."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.contract import SamplingInput, SchedulerOutput
from penstock.kernels.bound_step import StepOutcome
from penstock.runner.model_runner import RunnerLimits
from penstock.runner.stage import NoPipeline
from support.runners import VOCAB_SIZE, Driver, make_runner, new_request


class FirstOfTwo(NoPipeline):
    is_last = False
    has_others = True

    def __init__(self) -> None:
        self.received: list[int] = []

    def receive_outcome(self, step_id: int, outcome: StepOutcome) -> None:
        self.received.append(step_id)


@pytest.mark.parametrize(("num_buffer_sets", "received"), [(1, [1]), (2, [])])
def test_a_step_that_takes_the_buffers_of_another_waits_for_its_outcome(
    num_buffer_sets: int, received: list[int]
) -> None:
    stage: Any = FirstOfTwo()
    limits = RunnerLimits(8, 64, 64, VOCAB_SIZE, max_concurrent_steps=num_buffer_sets)
    driver = Driver(make_runner(stage=stage, limits=limits))
    driver.launch({"a": 2}, [new_request("a", [5, 6])])
    driver.runner.sample_tokens(SamplingInput(step_id=1))
    other = SchedulerOutput(
        step_id=2, scheduled_new_reqs=[new_request("b", [7], first_block=20)], num_scheduled_tokens={"b": 1}
    )
    driver.runner.execute_model(other)
    assert stage.received == received
