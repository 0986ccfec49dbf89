"""Steps that were run here and are sampled by a later stage: what is known of them at once, and what comes later."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from penstock.contract import SchedulerOutput
from penstock.kernels.bound_step import StepOutcome
from penstock.runner.batch_layout import BatchLayout
from penstock.runner.input_batch import InputBatch
from penstock.runner.lanes import Lane
from penstock.runner.request_states import RequestStates
from penstock.runner.stage import OneStage


@dataclass(frozen=True, slots=True)
class UnfinishedStep:
    """A step that sampled for these requests, whose tokens are not known here. Its lane keeps its inputs till then."""

    step_id: int
    lane: Lane
    batch: InputBatch
    req_ids: Collection[str]

    def concerns(self, output: SchedulerOutput) -> bool:
        """Whether a step runs, or lets go of, a request that this one sampled for."""
        return not (
            output.num_scheduled_tokens.keys().isdisjoint(self.req_ids)
            and output.finished_req_ids.isdisjoint(self.req_ids)
            and output.preempted_req_ids.isdisjoint(self.req_ids)
        )


class UnfinishedSteps:
    """In their order, which is that of their outcomes.

    What a step computes is noted in the state at once, as if all its drafts were accepted, so that the next chunk of a
    prompt waits for nothing; what it sampled when somebody needs it.
    """

    def __init__(self, requests: RequestStates, stage: OneStage) -> None:
        self._requests = requests
        self._stage = stage
        self._steps: list[UnfinishedStep] = []

    def add(self, step_id: int, lane: Lane, batch: InputBatch) -> bool:
        """A step was run. Returns whether its outcome is still to come: not where it samples for nobody."""
        outcome = _empty_outcome(batch)
        batch.step.advance(outcome)
        req_ids = sampling_requests(batch.layout, self._requests)
        if req_ids:
            self._steps.append(UnfinishedStep(step_id, lane, batch, req_ids))
        return bool(req_ids)

    def finish_for(self, output: SchedulerOutput, lane: Lane) -> Iterator[tuple[int, StepOutcome]]:
        """Finish what this step needs, whose tokens are to be prepared in this lane: by step, its outcome."""
        taken = lane if output.num_scheduled_tokens else None
        while any(step.lane is taken or step.concerns(output) for step in self._steps):
            yield self._finish_oldest()

    def finish(self) -> Iterator[tuple[int, StepOutcome]]:
        """Finish all."""
        while self._steps:
            yield self._finish_oldest()

    def _finish_oldest(self) -> tuple[int, StepOutcome]:
        step = self._steps.pop(0)
        outcome = _empty_outcome(step.batch)
        self._stage.receive_outcome(step.step_id, outcome)
        # The state has what was computed: it counts nothing but rejections now.
        tensors = step.batch.layout.tensors
        num_computed_R = tensors.num_scheduled_R[: tensors.num_reqs]
        outcome.num_rejected.add_(num_computed_R)
        step.batch.step.advance(outcome)
        outcome.num_rejected.sub_(num_computed_R)
        return step.step_id, outcome


def sampling_requests(layout: BatchLayout, requests: RequestStates) -> Collection[str]:
    """For whom a step samples, as all stages know it from its message: not where a prompt goes on after it."""
    if layout.is_all_decodes:
        return layout.req_ids
    known = requests.num_computed_tokens_upper_bound(layout.slots_np) + layout.counts_np
    samples = known >= requests.prefill_len.host[layout.slots_np]
    return [req_id for req_id, is_sampled in zip(layout.req_ids, samples.tolist(), strict=True) if is_sampled]


def _empty_outcome(batch: InputBatch) -> StepOutcome:
    """The step's own table, without tokens, rejections and failures."""
    num_rows, device = len(batch.logits_rows.positions), batch.positions.device
    nothing = torch.zeros(num_rows, dtype=torch.int64, device=device)
    outcome, _ = batch.step.outcome(nothing, torch.zeros(num_rows, dtype=torch.bool, device=device))
    outcome.table_RX.zero_()
    return outcome
