"""Base of output heads that pool: vectors instead of tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from penstock.contract import ArrayBytes, PooledOutput
from penstock.runner.async_output import ReadyOutput
from penstock.runner.frame import Frame
from penstock.runner.output_heads.base import HeadParts, OutputHead
from penstock.runner.output_heads.earlier_stage import sampling_requests
from penstock.runner.request_states import empty_outcome


class PoolingHead(OutputHead):
    """Output head that gives one vector per request, in the step that completes its prompt.

    A prompt may come in several chunks, unless `enable_chunked_prefill=False`; what later chunks need of earlier ones
    is kept by the head, or by an owner of per-slot state.
    """

    def __init__(self, parts: HeadParts) -> None:
        self._requests = parts.requests
        self._owners = parts.owners

    @abstractmethod
    def pool(self, frame: Frame, is_complete: Sequence[bool]) -> Sequence[Tensor | None]:
        """The vectors of a step's requests, on the CPU, in batch order; None where the prompt is not complete.

        is_complete: whether the step completes the prompt, per request.
        """

    def finish(self, frame: Frame) -> ReadyOutput:
        pooled: list[ArrayBytes | None] = []
        if frame.has_tokens:
            complete = set(sampling_requests(frame.batch.layout, self._requests))
            vectors = self.pool(frame, [req_id in complete for req_id in frame.req_ids])
            pooled = [None if vector is None else ArrayBytes.of(vector.numpy()) for vector in vectors]
            self._owners.commit(frame, empty_outcome(frame.batch))
        frame.drop_outputs()
        return ReadyOutput(
            PooledOutput(step_id=frame.step_id, req_ids=frame.req_ids, pooled=pooled, errors=frame.errors)
        )
