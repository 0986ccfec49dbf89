"""Which lane a step has."""

from __future__ import annotations

from typing import Any

from penstock.contract import SchedulerOutput
from penstock.runner.fast_paths import PlainPath
from penstock.runner.lanes import Lane, Lanes


def step(step_id: int, **num_tokens: int) -> SchedulerOutput:
    return SchedulerOutput(step_id=step_id, num_scheduled_tokens=num_tokens, finished_req_ids={"gone"})


def test_steps_take_turns_and_one_without_tokens_leaves_the_last_step_its_lane() -> None:
    batcher: Any = None
    lanes = Lanes([Lane(batcher, PlainPath()) for _ in range(2)])
    taken = []
    for output in (step(0, a=1), step(1), step(2, b=1), step(3), step(4, a=1)):
        lanes.turn_to(output)
        taken.append(lanes.current.paths)
    assert taken[0] is taken[1] is taken[4]
    assert taken[2] is taken[3] is not taken[0]
