"""Base of output heads that pool: vectors instead of tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from penstock.device import Device
from penstock.features.pooling.async_pooled import AsyncPooled, pooled_output
from penstock.runner.async_output import ReadyOutput, StepOutput
from penstock.runner.execute.execution import POOLING
from penstock.runner.output_heads.base import HeadServices, OutputHead
from penstock.runner.output_heads.earlier_stage import sampling_requests
from penstock.runner.request_states import empty_outcome
from penstock.step.frame import Frame


class PoolingHead(OutputHead):
    """Output head that gives one vector per request, in the step that completes its prompt.

    A prompt may come in several chunks, unless `enable_chunked_prefill=False`; what later chunks need of earlier ones
    is kept by the head, or by an owner of per-slot state.
    """

    memory_name, memory_why = "pooling", "pooling"

    def __init__(self, services: HeadServices) -> None:
        self._device: Device = services.device
        self._rank = services.rank
        self._requests = services.requests
        self._owners = services.owners
        self._execution = services.execution

    @abstractmethod
    def pool(self, frame: Frame, is_complete: Sequence[bool]) -> Sequence[Tensor | None]:
        """The vectors of a step's requests, in batch order; None where the prompt is not complete.

        is_complete: whether the step completes the prompt, per request.
        """

    def finish(self, frame: Frame) -> StepOutput:
        vectors: Sequence[Tensor | None] = []
        if frame.has_tokens:
            complete = set(sampling_requests(frame.batch.layout, self._requests))
            is_complete = [req_id in complete for req_id in frame.req_ids]
            vectors = self._execution.compute(lambda: self.pool(frame, is_complete), POOLING)
            self._owners.commit(frame, empty_outcome(frame.batch))
        frame.drop_outputs()
        if any(vector is not None and not vector.is_cpu for vector in vectors):
            return AsyncPooled(self._device, frame.step_id, frame.req_ids, vectors, frame.errors, rank=self._rank)
        return ReadyOutput(pooled_output(frame.step_id, frame.req_ids, vectors, frame.errors))
