"""Output heads of plugins."""

from __future__ import annotations

from typing import Any

import torch

from penstock.contract import PooledOutput, SampledOutput
from penstock.runner.async_output import ReadyOutput
from penstock.runner.output_heads import HeadServices, OutputHead
from penstock.step.frame import Frame, RowOutput, WantedOutputs
from support.runners import Driver, make_runner, new_request, next_token, state_of


class LastHidden(OutputHead):
    """Pools to the hidden state of a prompt's last token."""

    def __init__(self, services: HeadServices) -> None:
        self._owners = services.owners

    def wants(self, frame: Frame) -> WantedOutputs:
        return WantedOutputs(RowOutput.HIDDEN)

    def finish(self, frame: Frame) -> ReadyOutput:
        if not frame.has_tokens or frame.hidden is None:
            return ReadyOutput(PooledOutput(step_id=frame.step_id, errors=frame.errors))
        nothing = torch.zeros(len(frame.hidden), dtype=torch.int64)
        outcome, _ = frame.batch.step.outcome(nothing, nothing)
        pooled = zip(outcome.num_sampled.tolist(), frame.hidden.tolist(), strict=True)
        self._owners.commit(frame, outcome)
        return ReadyOutput(
            PooledOutput(
                step_id=frame.step_id,
                req_ids=frame.req_ids,
                errors=frame.errors,
                pooled=[values if is_complete else None for is_complete, values in pooled],
            )
        )


def test_an_engine_that_pools_has_a_result_once_a_prompt_is_complete() -> None:
    runner = make_runner(make_head=LastHidden)
    driver = Driver(runner)
    new = [new_request("a", [5, 6, 7, 8]), new_request("b", [9], first_block=20)]
    first: Any = driver.step({"a": 3, "b": 1}, new)
    assert not isinstance(first, SampledOutput)
    assert (first.req_ids, first.pooled) == (["b", "a"], [[next_token(9, 0)], None])
    assert state_of(runner, "a") == (3, 4)
    last: Any = driver.step({"a": 1}, finished={"b"})
    assert (last.req_ids, last.pooled) == (["a"], [[next_token(8, 3)]])
    empty: Any = driver.step({}, finished={"a"})
    assert empty.pooled == []
