"""Progress of requests: tokens, text, log-probabilities and metrics so far, as their consumers read them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from penstock.contract import ArrayBytes, LogprobsLists, Parts, RequestOutputKind, SamplingParams
from penstock.contract.parts import OutputPart
from penstock.contract.sampling_params import ALL_LOGPROBS
from penstock.engine.messages import EngineRequest
from penstock.engine.output.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from penstock.features.lora.request import adapter_of
from penstock.scheduler.acceptance import SpecDecodeMetrics
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.text.detokenizer import Detokenizer, NoDetokenizer, SpecialTokens
from penstock.text.stop_strings import StopScanner, StopStrings
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.structured.final_check import FinalCheck

logger = logging.getLogger(__name__)
_STOP = FinishReason.STOP  # looked up for every token
# Ends of requests that did not stop by themselves.
_CUT_OFF = (FinishReason.ABORT, FinishReason.ERROR, FinishReason.INVALID)
# Estimated memory of a token with its text, and of a log-probability.
_TOKEN_BYTES, _LOGPROB_BYTES = 100, 170


class Progress(Protocol):
    """Output of a caller's request so far, which its consumer reads: of one sample, or of all samples together."""

    @property
    def req_id(self) -> str: ...

    @property
    def inbox(self) -> Inbox: ...

    @property
    def finished(self) -> bool: ...

    @property
    def unread_bytes(self) -> int:
        """Estimated bytes of the output that was not taken (`take_output`)."""

    @property
    def error(self) -> str | None: ...

    @property
    def awaits_check(self) -> bool:
        """Whether an output would wait for the check of a whole one by its schema, which takes up to a second."""

    def check(self) -> None:
        """Check the whole outputs that are there, without a lock: they do not change any more."""

    def output(self) -> RequestOutput:
        """Snapshot of everything so far."""

    def take_output(self) -> RequestOutput:
        """As `output`, with only the text, tokens and log-probabilities since the last call."""


class Inbox(Protocol):
    """Receives the progress of a consumer's requests after each step; a deque, for example."""

    def append(self, progress: Progress, /) -> None: ...


class RequestProgress:
    """State of one request's output: everything so far, and the position up to which the consumer has read it.

    index: number of the sample among the prompt's n outputs. stops: stop strings, which these share; None for none.
    final_check: check of the whole output by its JSON schema; None without one.
    """

    def __init__(
        self,
        request: EngineRequest,
        prompt: str | None,
        tokenizer: Tokenizer,
        inbox: Inbox,
        index: int = 0,
        stops: StopStrings | None = None,
        final_check: FinalCheck | None = None,
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.index = index
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.inbox = inbox
        self.token_ids: list[int] = []
        self.num_logprobs = params.logprobs
        self.logprobs: list[dict[int, Logprob]] = []
        self._num_logprobs_dropped = 0
        self._is_streamed = params.output_kind is RequestOutputKind.DELTA
        self.cumulative_logprob = 0.0
        self.pooled: ArrayBytes | None = None
        self._parts: dict[str, OutputPart] = {}
        self._results: dict[str, Any] = {}
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.awaits_check = False
        self._schema_errors: list[str] | None = None
        self._final_check = final_check
        self.error: str | None = None
        self.num_cached_tokens = 0
        self._first_scheduled_time: float | None = None
        self._first_token_time: float | None = None
        self.last_token_time: float | None = None
        self._finished_time: float | None = None
        self._num_preemptions = 0
        self._spec_decode_metrics = SpecDecodeMetrics()
        self._pieces: list[str] = []
        self._num_detokenized = 0
        self._num_pieces_taken = 0
        self._num_tokens_taken = 0
        self._includes_stop = params.include_stop_str_in_output
        # Stop strings do not count in the text of the first `min_tokens` tokens.
        self._num_tokens_without_stop = params.min_tokens
        self._scanner = None if stops is None else StopScanner(stops, includes_stop=self._includes_stop)
        self._detokenizer = _start_detokenizer(tokenizer, params, request.prompt_token_ids)
        self._push = self._detokenizer.push

    @property
    def req_id(self) -> str:
        return self.request.req_id

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def unread_bytes(self) -> int:
        """Estimated bytes of the output that was not taken (`take_output`)."""
        num_logprobs = 0
        if self.num_logprobs is not None and self.logprobs:
            num_logprobs = len(self.logprobs[-1])
        num_tokens = len(self.token_ids) - self._num_tokens_taken
        return num_tokens * (_TOKEN_BYTES + num_logprobs * _LOGPROB_BYTES)

    @property
    def text(self) -> str:
        self._detokenize(len(self.token_ids))
        return "".join(self._pieces)

    def take_text(self) -> str:
        """Return the text since the last call."""
        self._detokenize(len(self.token_ids))
        new = self._pieces[self._num_pieces_taken :]
        self._num_pieces_taken = len(self._pieces)
        return "".join(new)

    def output(self) -> RequestOutput:
        """Snapshot of everything so far."""
        return self._request_output(self._completion(self.text, 0))

    def take_output(self) -> RequestOutput:
        """As `output`, with only the text, tokens and log-probabilities since the last call."""
        first_token, self._num_tokens_taken = self._num_tokens_taken, len(self.token_ids)
        output = self._request_output(self._completion(self.take_text(), first_token))
        if self._is_streamed:
            # Nothing reads them again, and they take most of the memory.
            self._num_logprobs_dropped += len(self.logprobs)
            self.logprobs = []
        return output

    def _completion(self, text: str, first_token: int) -> CompletionOutput:
        has_logprobs = self.num_logprobs is not None
        self.check()
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=self.cumulative_logprob if has_logprobs else None,
            logprobs=self.logprobs[max(0, first_token - self._num_logprobs_dropped) :] if has_logprobs else None,
            finish_reason=None if self.finish_reason is None else self.finish_reason.shown,
            stop_reason=self.stop_reason,
            parts=self._take_results(),
            schema_errors=self._schema_errors,
        )

    def check(self) -> None:
        constraint = self.request.sampling_params.structured_outputs
        if self.awaits_check and self._final_check is not None and constraint is not None:
            self._schema_errors = self._final_check.errors(constraint, self.token_ids)
        self.awaits_check = False

    def _take_results(self) -> dict[str, Any]:
        """Results of features by name, once the request has ended."""
        if self._parts and self.finished:
            num_tokens = len(self.request.prompt_token_ids) + len(self.token_ids)
            self._results = {name: part.result(num_tokens) for name, part in self._parts.items()}
            self._parts = {}
        return self._results

    def _request_output(self, completion: CompletionOutput) -> RequestOutput:
        return RequestOutput(
            request_id=self.req_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[completion],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics(),
            prompt_logprobs=self.prompt_logprobs,
            error=self.error,
            is_invalid=self.finish_reason is FinishReason.INVALID,
            pooled_data=self.pooled,
            lora_request=adapter_of(self.request.parts),
        )

    def metrics(self) -> RequestMetrics:
        """Times and counts of the request so far."""
        first, last = self._first_token_time, self.last_token_time
        return RequestMetrics(
            arrival_time=self.request.arrival_time,
            first_scheduled_time=self._first_scheduled_time,
            first_token_time=first,
            last_token_time=last,
            finished_time=self._finished_time,
            num_preemptions=self._num_preemptions,
            num_generated_tokens=len(self.token_ids),
            num_cached_tokens=self.num_cached_tokens,
            decoding_s=0.0 if first is None or last is None else last - first,
            spec_decode_metrics=self._spec_decode_metrics.since(SpecDecodeMetrics()),
        )

    def advance(self, output: EngineCoreOutput, now: float) -> None:
        """Update with one step's output. now: monotonic seconds."""
        new_token_ids = output.new_token_ids
        if new_token_ids:
            self.token_ids += new_token_ids
            if output.num_draft_tokens:
                self._spec_decode_metrics.note(output.num_draft_tokens, len(new_token_ids) - 1)
            if self._scanner is not None:
                self._add_scanned(self._with_text(new_token_ids, output), len(new_token_ids), self._scanner)
            if self._first_token_time is None:
                self._first_token_time = now
            self.last_token_time = now
        if self.num_logprobs is not None and output.new_logprobs is not None:
            self._add_logprobs(output.new_logprobs, self.num_logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *self._readable(output.prompt_logprobs, ALL_LOGPROBS)]
        if output.parts is not None:
            self._take_parts(output.parts)
        if output.first_scheduled_time is not None:
            self._first_scheduled_time = output.first_scheduled_time
            self._num_preemptions = output.num_preemptions
            self.num_cached_tokens = output.num_cached_tokens
        has_found_stop = self._scanner is not None and self._scanner.found is not None
        if output.finish_reason is not None or has_found_stop:
            self._finish(output, now)

    def _take_parts(self, parts: Parts) -> None:
        for name, part in parts.items():
            assert isinstance(part, OutputPart), "features add no others to outputs"
            self._parts[name] = part.after(self._parts.get(name))

    def _with_text(self, new_token_ids: list[int], output: EngineCoreOutput) -> list[int]:
        """Tokens of an output that are part of the text: all but a hidden stop token."""
        is_stop_hidden = output.finish_reason is _STOP and not self._includes_stop
        return new_token_ids[:-1] if is_stop_hidden else new_token_ids

    def _detokenize(self, end: int) -> None:
        """Detokenise up to the token at `end`; text with stop strings is detokenised in `advance` already.

        Deferred until the text is read: the CPU caches are cold after a forward pass, so tokens cost several times as
        much one by one as together.
        """
        if self._scanner is not None or self._num_detokenized == len(self.token_ids):
            return
        for token_id in self.token_ids[self._num_detokenized : end]:
            piece = self._push(token_id)
            if piece:
                self._pieces.append(piece)
        self._num_detokenized = len(self.token_ids)

    def _add_scanned(self, token_ids: list[int], num_new: int, scanner: StopScanner) -> None:
        """Detokenise up to a stop string, if one is found, and drop the tokens after it."""
        for number, token_id in enumerate(token_ids, start=1):
            may_stop = self._num_tokens_without_stop <= 0
            self._num_tokens_without_stop -= 1
            piece = scanner.push(self._push(token_id), may_stop=may_stop)
            if piece:
                self._pieces.append(piece)
            if scanner.found is not None:
                del self.token_ids[len(self.token_ids) - num_new + number :]
                return

    def _add_logprobs(self, rows: LogprobsLists, num_logprobs: int) -> None:
        """Add the log-probabilities of the tokens that were kept."""
        num_kept = len(self.token_ids) - self._num_logprobs_dropped - len(self.logprobs)
        self.logprobs += islice(self._readable(rows, num_logprobs), num_kept)
        self.cumulative_logprob += sum(values[0] for values in rows.logprobs[:num_kept])

    def _readable(self, rows: LogprobsLists, num_logprobs: int) -> Iterator[dict[int, Logprob]]:
        """Convert rows to `Logprob` by token id: the row's own token, and the `num_logprobs` most likely ones."""
        text = self.tokenizer.token_text
        width = None if num_logprobs == ALL_LOGPROBS else num_logprobs + 1
        for ids, values, rank in zip(rows.logprob_token_ids, rows.logprobs, rows.sampled_token_ranks, strict=True):
            row = {ids[0]: Logprob(values[0], rank, text(ids[0]))}
            for column, token_id in enumerate(ids[1:width], start=1):
                row[token_id] = Logprob(values[column], column, text(token_id))
            yield row

    def _finish(self, output: EngineCoreOutput, now: float) -> None:
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.error = output.error
        self.pooled = output.pooled
        self._finished_time = now
        num_hidden = len(output.new_token_ids) - len(self._with_text(output.new_token_ids, output))
        self._detokenize(len(self.token_ids) - num_hidden)
        piece = self._detokenizer.flush()
        if self._scanner is not None:
            piece = self._scan_last(piece, self._scanner)
        if piece:
            self._pieces.append(piece)
        self.awaits_check = self._final_check is not None and output.error is None

    def fail(self, error: Exception, now: float) -> None:
        """End a request whose output processing raised an error; it keeps its output so far."""
        logger.error("Request %s ends, since its output cannot be made", self.req_id, exc_info=error)
        self.finish_reason = FinishReason.ERROR
        self.error = f"The output of this request failed with {type(error).__name__}: {error}"
        self._num_detokenized = len(self.token_ids)
        self._finished_time = now

    def _scan_last(self, piece: str, scanner: StopScanner) -> str:
        if scanner.found is None:
            piece = scanner.push(piece, may_stop=self._num_tokens_without_stop < 0) + scanner.flush()
        else:
            piece = ""
        if scanner.found is not None and self.finish_reason not in _CUT_OFF:
            self.finish_reason, self.stop_reason = FinishReason.STOP, scanner.found
        return piece


def _start_detokenizer(tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: list[int]) -> Detokenizer:
    if not params.detokenize:
        return NoDetokenizer()
    special = SpecialTokens(are_shown=not params.skip_special_tokens, are_spaced=params.spaces_between_special_tokens)
    return tokenizer.start_detokenizer(prompt_token_ids, special)
