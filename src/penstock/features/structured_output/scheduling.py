"""Scheduler side of structured output: requests wait for their grammars, and each step gets the bitmask of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from msgspec.structs import replace

from penstock.config import ModelConfig
from penstock.config.reasoning import ReasoningMarkers
from penstock.contract import SchedulerOutput, StructuredOutputsParams
from penstock.errors import InvalidRequest, UnsupportedFeature
from penstock.features.structured_output.messages import BitmaskPart, num_words
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.outputs import FinishReason
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices
from penstock.structured.backend import CompiledGrammar, GrammarBackend, Matcher
from penstock.structured.compiler import Compiled, GrammarCompiler

logger = logging.getLogger(__name__)
# Reason for which a request waits while its grammar is compiled.
_GRAMMAR = "its grammar"
# Draft token that the host does not know, after which there is no bitmask row.
_UNKNOWN_DRAFT = -1


@dataclass(slots=True, eq=False)
class _Constrained:
    """A constrained request. grammar, matcher: None while the grammar is compiled.

    num_accepted: its output tokens that the matcher has accepted.
    """

    request: Request
    params: StructuredOutputsParams
    num_accepted: int = 0
    grammar: CompiledGrammar | None = None
    matcher: Matcher | None = None

    def start(self) -> None:
        """Create the matcher, and accept the output so far. Raises ValueError for tokens that are not allowed."""
        assert self.grammar is not None, "a matcher is created after its grammar is compiled"
        self.matcher = self.grammar.start(self.request.prompt_token_ids)
        self.num_accepted = 0
        self.accept_output()

    def accept_output(self) -> None:
        """Accept the output tokens that have come since. Raises ValueError for tokens that are not allowed."""
        request = self.request
        num_new = request.num_output_tokens - self.num_accepted
        if num_new and self._started.accept(request.all_token_ids[-num_new:]) != num_new:
            raise ValueError("it has tokens that the constraint does not allow")
        self.num_accepted += num_new

    def fill(self, drafts: Sequence[int], rows: np.ndarray) -> None:
        """Write the rows of the next token and after each draft token. Rows after a draft that the grammar rejects stay
        empty: no token sampled there is used.
        """
        self.accept_output()
        self._started.fill(rows[0])
        if not _fill_after_drafts(self._started, drafts, rows[1:]):
            self.start()

    @property
    def _started(self) -> Matcher:
        assert self.matcher is not None, "a request runs after its grammar is compiled"
        return self.matcher


class StructuredOutputScheduling(SchedulerFeature):
    """Follows constrained requests by their known tokens, so it loses nothing with a worker.

    A failing grammar ends its own requests. Only the core's thread calls the methods.
    make_backend: called once, in a thread of the compiler, with the first constraint; None for that of the engine's
    tokenizer.
    """

    def __init__(self, services: SchedulerServices, make_backend: Callable[[], GrammarBackend] | None = None) -> None:
        config = services.config
        self._services = services
        self._num_words = num_words(config.model.vocab_size)
        # Where ranks must agree on time, schedules do not depend on the compiler's speed: requests are added after it.
        self._waits_for_compiler = config.parallel.must_agree_on_time
        self._constrained: dict[str, _Constrained] = {}
        self._waiting: dict[StructuredOutputsParams, list[_Constrained]] = {}
        self._compiler = GrammarCompiler(
            make_backend or partial(_backend_of, config.model, config.constraints_wait_for),
            timeout_s=config.structured.max_grammar_compile_s,
            max_cached=config.structured.max_cached_grammars,
        )

    def request_added(self, request: Request) -> None:
        params = request.sampling_params.structured_outputs
        if params is None:
            return
        request.awaits_parts = True
        constrained = self._constrained[request.req_id] = _Constrained(request, params)
        self._services.scheduler.wait_for(request.req_id, _GRAMMAR)
        grammar = self._compiler.find(params)
        if grammar is not None:
            self._start([constrained], grammar)
            return
        if params not in self._waiting:
            # Without a thread it raises, and the next request tries again.
            self._compile(params)
        self._waiting.setdefault(params, []).append(constrained)

    def request_ended(self, request: Request) -> None:
        self._constrained.pop(request.req_id, None)

    def sampling_part(self, message: SchedulerOutput) -> BitmaskPart | None:
        drafts_of = message.scheduled_spec_decode_tokens
        rows_of: dict[str, np.ndarray] = {}
        for req_id in message.awaiting_req_ids:
            constrained = self._constrained.get(req_id)
            if constrained is None:
                continue
            drafts = drafts_of.get(req_id, ())
            rows = np.zeros((1 + len(drafts), self._num_words), np.int32)
            try:
                constrained.fill(drafts, rows)
            except Exception as error:
                self._end([constrained], error)
            else:
                rows_of[req_id] = rows
        if not rows_of:
            return None
        return BitmaskPart(
            req_ids=list(rows_of),
            bitmask=b"".join(rows.tobytes() for rows in rows_of.values()),
            num_rows=list(map(len, rows_of.values())) if drafts_of else [],
        )

    def close(self) -> None:
        self._compiler.close()

    def _compile(self, params: StructuredOutputsParams) -> None:
        is_compiled = threading.Event()

        def take(params: StructuredOutputsParams, result: Compiled) -> None:
            self._services.call_soon(partial(self._take_compiled, params, result))
            is_compiled.set()

        self._compiler.compile(params, take)
        if self._waits_for_compiler:
            is_compiled.wait()

    def _take_compiled(self, params: StructuredOutputsParams, result: Compiled) -> None:
        """Let the requests that wait for this grammar run, or end them if it cannot be compiled."""
        waiting = [one for one in self._waiting.pop(params, ()) if self._constrained.get(one.request.req_id) is one]
        if isinstance(result, Exception):
            self._end(waiting, result)
        else:
            self._start(waiting, result)

    def _start(self, waiting: Iterable[_Constrained], grammar: CompiledGrammar) -> None:
        """Start the matchers of requests, which may run then."""
        for constrained in waiting:
            constrained.grammar = grammar
            try:
                constrained.start()
            except Exception as error:
                # A request cannot end while it is being added.
                self._services.call_soon(partial(self._end, [constrained], error))
            else:
                self._services.scheduler.ready(constrained.request.req_id, _GRAMMAR)

    def _end(self, failed: Sequence[_Constrained], error: Exception) -> None:
        """End those requests, of these, that have not ended, after a failure of their grammar."""
        # A model whose tokenizer allows no constraints refuses each of them.
        is_invalid = isinstance(error, (InvalidRequest, UnsupportedFeature))
        req_ids = [one.request.req_id for one in failed if self._constrained.get(one.request.req_id) is one]
        reason = FinishReason.INVALID if is_invalid else FinishReason.ERROR
        ended = self._services.scheduler.finish_requests(req_ids, reason)
        if not ended:
            return
        why = str(error) or type(error).__name__
        if is_invalid:
            logger.info("%d requests end with a constraint that cannot be followed: %s", len(ended), why)
        else:
            logger.error("The grammar of %d requests failed", len(ended), exc_info=error)
        text = why if is_invalid else f"Its grammar failed: {why}"
        self._services.tell_ends([replace(output, error=text) for output in ended])


def _backend_of(model: ModelConfig, reasoning: ReasoningMarkers | None) -> GrammarBackend:
    """Create the backend of the engine's tokenizer, which the core loads for the first constraint only."""
    from penstock.features.structured_output.backend import backend_of

    return backend_of(model, reasoning)


def _fill_after_drafts(matcher: Matcher, drafts: Sequence[int], rows: np.ndarray) -> bool:
    """Write the rows after draft tokens. False if the matcher failed at a draft and must be started again.

    Such a failure rejects the drafts and does not end the request, which may never sample them.
    """
    num_taken = 0
    try:
        for row, draft in zip(rows, drafts, strict=True):
            if draft == _UNKNOWN_DRAFT or not matcher.accept([draft]):
                break
            num_taken += 1
            matcher.fill(row)
        matcher.rollback(num_taken)
    except Exception:
        rows[:] = 0
        return False
    return True
