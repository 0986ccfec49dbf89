"""Something else than generation after the forward pass: the runner does not notice."""

from __future__ import annotations

from typing import Any

import torch

from penstock.attention import ForwardContext
from penstock.contract import PooledOutput, SampledOutput
from penstock.models.interface import LanguageModel, ModelInputs
from penstock.runner.after_forward import AfterForward, PendingStep
from penstock.runner.async_output import ReadyOutput
from penstock.runner.input_batch import InputBatch
from penstock.runner.model_runner import ModelRunner
from support.runners import Driver, make_runner, new_request, next_token, state_of


class LastHidden(AfterForward):
    """Pools to the hidden state of a prompt's last token."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def run(
        self,
        model: LanguageModel,
        batch: InputBatch,
        inputs: ModelInputs,
        context: ForwardContext,
        errors: dict[str, str],
        *,
        is_repeated: bool,
        num_drafts: int,
    ) -> PendingStep:
        hidden = self._runner.paths.forward(model, inputs, context)
        return PendingStep(errors, batch, batch.layout.of_logits_rows(hidden))

    def finish(self, model: LanguageModel, step_id: int, step: PendingStep) -> ReadyOutput:
        batch, hidden = step.batch, step.hidden
        if batch is None or hidden is None:
            return ReadyOutput(PooledOutput(step_id=step_id, errors=step.errors))
        nothing = torch.zeros(len(hidden), dtype=torch.int64)
        outcome, _ = batch.step.outcome(nothing, nothing)
        pooled = zip(outcome.num_sampled.tolist(), hidden.tolist(), strict=True)
        batch.step.advance(outcome)
        return ReadyOutput(
            PooledOutput(
                step_id=step_id,
                req_ids=batch.layout.req_ids,
                errors=step.errors,
                pooled=[values if is_complete else None for is_complete, values in pooled],
            )
        )


def test_an_engine_that_pools_has_a_result_once_a_prompt_is_complete() -> None:
    runner = make_runner()
    runner.after_forward = LastHidden(runner)
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
