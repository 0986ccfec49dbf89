"""From the core's tokens to text, log-probabilities and metrics, per request.

This runs after every step for every running request, so a token costs a few dictionary look-ups here, and what a
caller may never ask for (a whole `RequestOutput`) is built only on demand.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from penstock.contract import LogprobsLists
from penstock.contract.sampling_params import ALL_LOGPROBS
from penstock.engine.messages import EngineRequest
from penstock.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import InvalidRequest
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason


class Inbox(Protocol):
    """Where a consumer hears that a request got on; a deque, for example."""

    def append(self, progress: RequestProgress, /) -> None: ...


class RequestProgress:
    """One request on its way: what it has so far, and what its consumer has not seen yet."""

    __slots__ = (
        "_detokenizer",
        "_num_pieces_taken",
        "_pieces",
        "cumulative_logprob",
        "error",
        "finish_reason",
        "inbox",
        "logprobs",
        "metrics",
        "num_cached_tokens",
        "num_logprobs",
        "prompt",
        "prompt_logprobs",
        "request",
        "stop_reason",
        "token_ids",
        "tokenizer",
    )

    def __init__(self, request: EngineRequest, prompt: str | None, tokenizer: Tokenizer, inbox: Inbox) -> None:
        self.request = request
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.inbox = inbox
        self.token_ids: list[int] = []
        self.num_logprobs = request.sampling_params.logprobs
        self.logprobs: list[dict[int, Logprob]] = []
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self._pieces: list[str] = []
        self._num_pieces_taken = 0
        self._detokenizer = tokenizer.start_detokenizer(request.prompt_token_ids)

    @property
    def req_id(self) -> str:
        return self.request.req_id

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def take_text(self) -> str:
        """The text that is new since the last call."""
        new = self._pieces[self._num_pieces_taken :]
        self._num_pieces_taken = len(self._pieces)
        return "".join(new)

    def output(self) -> RequestOutput:
        """Everything so far, as a copy that does not change while the request goes on."""
        has_logprobs = self.num_logprobs is not None
        completion = CompletionOutput(
            index=0,
            text=self.text,
            token_ids=self.token_ids.copy(),
            cumulative_logprob=self.cumulative_logprob if has_logprobs else None,
            logprobs=self.logprobs.copy() if has_logprobs else None,
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=self.req_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[completion],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=copy.copy(self.metrics),
            prompt_logprobs=self.prompt_logprobs,
            error=self.error,
        )

    def advance(self, output: EngineCoreOutput, now: float) -> None:
        """Take in one step's output. now: monotonic seconds."""
        new_token_ids = output.new_token_ids
        metrics = self.metrics
        if new_token_ids:
            self.token_ids += new_token_ids
            self._add_text(new_token_ids, ends_with_stop_token=output.finish_reason is FinishReason.STOP)
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            metrics.last_token_time = now
            metrics.num_generated_tokens = len(self.token_ids)
        if self.num_logprobs is not None and output.new_logprobs is not None:
            self._add_logprobs(output.new_logprobs, self.num_logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *self._readable(output.prompt_logprobs, ALL_LOGPROBS)]
        metrics.num_preemptions = output.num_preemptions
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = output.first_scheduled_time
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            self._finish(output, now)

    def _add_text(self, token_ids: list[int], *, ends_with_stop_token: bool) -> None:
        for token_id in token_ids[:-1] if ends_with_stop_token else token_ids:
            piece = self._detokenizer.push(token_id)
            if piece:
                self._pieces.append(piece)

    def _add_logprobs(self, rows: LogprobsLists, num_logprobs: int) -> None:
        self.logprobs += self._readable(rows, num_logprobs)
        self.cumulative_logprob += sum(values[0] for values in rows.logprobs)

    def _readable(self, rows: LogprobsLists, num_logprobs: int) -> Iterator[dict[int, Logprob]]:
        """Per row: the token that is there, and as many of the likeliest as were asked for."""
        text = self.tokenizer.token_text
        width = None if num_logprobs == ALL_LOGPROBS else num_logprobs + 1
        for ids, values, rank in zip(rows.logprob_token_ids, rows.logprobs, rows.sampled_token_ranks, strict=True):
            row = {ids[0]: Logprob(values[0], rank, text(ids[0]))}
            for column, token_id in enumerate(ids[1:width], start=1):
                row[token_id] = Logprob(values[column], column, text(token_id))
            yield row

    def _finish(self, output: EngineCoreOutput, now: float) -> None:
        piece = self._detokenizer.flush()
        if piece:
            self._pieces.append(piece)
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.error = output.error
        self.metrics.finished_time = now


class OutputProcessor:
    """Knows the running requests, and brings each what the core reports about it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._running: dict[str, RequestProgress] = {}

    def add(self, request: EngineRequest, prompt: str | None, inbox: Inbox) -> RequestProgress:
        """Follow a request from now on. `inbox` gets its progress appended after every step that brought it on.

        Raises InvalidRequest when a running request has the same id.
        """
        if request.req_id in self._running:
            raise InvalidRequest(f"request_id={request.req_id!r} is that of a running request. Choose another.")
        progress = RequestProgress(request, prompt, self._tokenizer, inbox)
        self._running[request.req_id] = progress
        return progress

    def process(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Take in a step's outputs. Those of requests that are not followed (any more) are dropped."""
        now = time.monotonic()
        running = self._running
        for output in outputs:
            progress = running.get(output.req_id)
            if progress is None:
                continue
            progress.advance(output, now)
            if progress.finish_reason is not None:
                del running[output.req_id]
            progress.inbox.append(progress)

    def forget(self, req_ids: Iterable[str]) -> None:
        """Follow these requests no longer."""
        for req_id in req_ids:
            self._running.pop(req_id, None)
