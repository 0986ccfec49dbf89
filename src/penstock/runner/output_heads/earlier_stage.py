"""Output head of a pipeline stage before the last: it receives the outcomes that the last stage samples."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from penstock.contract import SampledOutput, SchedulerOutput
from penstock.runner.async_output import ReadyOutput
from penstock.runner.output_heads.base import HeadServices, OutputHead
from penstock.runner.request_states import RequestStates, empty_outcome
from penstock.step.batch import BatchLayout
from penstock.step.frame import Frame, WantedOutputs


@dataclass(frozen=True, slots=True)
class _AwaitedStep:
    """A step whose outcome is not received yet. Its frame keeps its inputs till then."""

    step_id: int
    frame: Frame
    req_ids: Collection[str]

    def concerns(self, output: SchedulerOutput) -> bool:
        """Whether a step runs, or removes, a request that this one sampled for."""
        return not (
            output.num_scheduled_tokens.keys().isdisjoint(self.req_ids)
            and output.finished_req_ids.isdisjoint(self.req_ids)
            and output.preempted_req_ids.isdisjoint(self.req_ids)
        )


class EarlierStage(OutputHead):
    """Commits a step in two halves.

    Computed tokens are committed at once, as if all drafts were accepted, so that the next chunk of a prompt does not
    wait; sampled tokens when a step depends on them. Outcomes are received in the order of their steps.
    """

    def __init__(self, services: HeadServices) -> None:
        self._requests = services.requests
        self._owners = services.owners
        self._speculator = services.speculator
        self._stage = services.stage
        self._awaited: list[_AwaitedStep] = []

    def wants(self, frame: Frame) -> WantedOutputs:
        return WantedOutputs(all_rows=True, aux_layers=self._stage.aux_here(self._speculator.aux_layers))

    def finish(self, frame: Frame) -> ReadyOutput:
        frame.drop_outputs()
        if frame.has_tokens:
            self._owners.commit_computed(frame)
            req_ids = sampling_requests(frame.batch.layout, self._requests)
            if req_ids:
                self._awaited.append(_AwaitedStep(frame.step_id, frame, req_ids))
        return ReadyOutput(SampledOutput(step_id=frame.step_id, errors=frame.errors))

    def receive_outcomes(self, output: SchedulerOutput, buffer_set: int | None) -> None:
        while any(step.frame.buffer_set == buffer_set or step.concerns(output) for step in self._awaited):
            self._receive_oldest()

    def catch_up(self) -> None:
        while self._awaited:
            self._receive_oldest()

    def _receive_oldest(self) -> None:
        step = self._awaited.pop(0)
        frame = step.frame
        outcome = empty_outcome(frame.batch)
        self._stage.receive_outcome(step.step_id, outcome)
        self._owners.commit_sampled(frame, outcome)
        if frame.num_drafts and self._speculator.drafts_for_all_stages:
            drafts_SK = self._requests.draft_token_ids.tensor
            self._stage.share_drafts(step.step_id, drafts_SK, frame.batch.layout.slots)


def sampling_requests(layout: BatchLayout, requests: RequestStates) -> Collection[str]:
    """Requests that the step samples for, derived on all stages from its message: not those still in prefill."""
    if layout.is_all_decodes:
        return layout.req_ids
    known = requests.num_computed_tokens_upper_bound(layout.slots_np) + layout.counts_np
    samples = known >= requests.prefill_len.host[layout.slots_np]
    return [req_id for req_id, is_sampled in zip(layout.req_ids, samples.tolist(), strict=True) if is_sampled]
