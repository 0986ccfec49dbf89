"""Request that continues in a replacement core."""

from __future__ import annotations

import msgspec

from penstock.engine.messages import EngineRequest
from penstock.scheduler.outputs import EngineCoreOutput


class ResumableRequest:
    """A request and its outputs so far, from which a replacement core continues.

    The reader sees one request: no token or log-probability comes twice, and its history goes on. The loss of a core
    counts as a preemption.
    """

    __slots__ = ("_history", "_num_preemptions", "_num_preemptions_before", "_request", "_token_ids")

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._token_ids: list[int] = []
        # `num_cached_tokens` and `first_scheduled_time`, which stay as first reported.
        self._history: tuple[int, float] | None = None
        self._num_preemptions = 0
        # In cores that are gone.
        self._num_preemptions_before = 0

    @property
    def priority(self) -> int:
        return self._request.priority

    def take(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Note a step's output. Returns it as its reader gets it."""
        self._token_ids += output.new_token_ids
        if output.first_scheduled_time is None:
            return output
        if self._history is None:
            self._history = output.num_cached_tokens, output.first_scheduled_time
        self._num_preemptions = output.num_preemptions + self._num_preemptions_before
        if not self._num_preemptions_before:
            return output
        num_cached_tokens, first_scheduled_time = self._history
        return msgspec.structs.replace(
            output,
            num_cached_tokens=num_cached_tokens,
            first_scheduled_time=first_scheduled_time,
            num_preemptions=self._num_preemptions,
        )

    def resume(self) -> EngineRequest:
        """Return the request for a replacement core, which continues after the tokens so far."""
        if self._history is not None:
            self._num_preemptions += 1
            self._num_preemptions_before = self._num_preemptions
        return msgspec.structs.replace(
            self._request, output_token_ids=[*self._request.output_token_ids, *self._token_ids], is_admitted=True
        )
