"""Structured outputs in the core: grammars of constrained requests, compiled in threads, and their bitmasks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from penstock.config import ModelConfig, StructuredOutputsConfig
from penstock.config.reasoning import HARMONY, REASONING_PARSERS, ReasoningMarkers
from penstock.contract import GrammarOutput, SchedulerOutput, StructuredOutputsParams
from penstock.engine.messages import EngineRequest
from penstock.errors import GrammarError, UnsupportedFeature
from penstock.scheduler.outputs import EngineCoreOutput
from penstock.structured.backend import CompiledGrammar, GrammarBackend, Matcher
from penstock.structured.compiler import Compiled, GrammarCompiler
from penstock.structured.harmony import HarmonyBackend
from penstock.structured.harmony_messages import HarmonyTokens
from penstock.structured.reasoning import ReasoningBackend, ReasoningTokens, other_spellings
from penstock.text.tokenizer import Tokenizer, load_tokenizer

# Draft token that the host does not know, after which there is no bitmask row.
_UNKNOWN_DRAFT = -1


class Grammar(Protocol):
    """Interface of the core's grammar: follows constrained requests by their tokens, and makes bitmasks for sampling.

    It advances only by tokens that the host has read, so it loses nothing with a worker.
    """

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Set the callback for a new result of `take_ready`; called from any thread, and ends the core's wait."""

    def add(self, request: EngineRequest) -> bool:
        """Follow a request, from its output tokens so far.

        False while its grammar is being compiled; `take_ready` returns the request's id afterwards.
        """

    def take_ready(self) -> Sequence[str]:
        """Return the ids of requests whose grammars have become ready since the last call.

        Raises GrammarError for requests whose grammars failed to compile.
        """

    def constrains(self, req_id: str) -> bool:
        """Whether this request is constrained."""

    def constrains_any(self, req_ids: Set[str]) -> bool:
        """Whether one of these requests is constrained."""

    def accept(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Advance by new tokens, in the order of their steps, and forget finished requests.

        Raises GrammarError for requests whose tokens violate their grammar, after advancing the others.
        """

    def bitmask(self, output: SchedulerOutput) -> GrammarOutput:
        """Allowed tokens of a step: called after it was executed and the previous step accepted.

        Raises GrammarError for requests whose grammars fail.
        """

    def close(self) -> None:
        """Stop the compiler's threads."""


@dataclass(slots=True)
class _Followed:
    """A constrained request. grammar, matcher: None while the grammar is compiled.

    output_token_ids: tokens that the matcher has accepted.
    """

    params: StructuredOutputsParams
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: list[int] = field(default_factory=list)
    grammar: CompiledGrammar | None = None
    matcher: Matcher | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def start(self) -> bool:
        """Create the matcher and accept the output tokens so far. False if they violate the grammar."""
        assert self.grammar is not None, "a matcher is created after its grammar is compiled"
        self.matcher = self.grammar.start(self.prompt_token_ids)
        return self.matcher.accept(self.output_token_ids) == len(self.output_token_ids)


class StructuredGrammar:
    """`Grammar` of an engine. The matchers live in the core's process, so workers have none of their state.

    Only the core's thread calls it; compiler threads call the `on_ready` callback.
    reasoning: markers of the reasoning part, after which constraints begin; None if they begin with the output.
    compiles_beside: False makes `add` wait for the compiler, so that schedules do not depend on its speed.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: StructuredOutputsConfig,
        reasoning: ReasoningMarkers | None = None,
        *,
        make_backend: Callable[[], GrammarBackend] | None = None,
        compiles_beside: bool = True,
    ) -> None:
        self._wake: Callable[[], None] = lambda: None
        self._num_words = (model.vocab_size + 31) // 32
        self._compiles_beside = compiles_beside
        self._has_come = threading.Event()
        self._followed: dict[str, _Followed] = {}
        self._waiting: dict[StructuredOutputsParams, list[str]] = {}
        # Filled by the threads that compile.
        self._compiled: deque[tuple[StructuredOutputsParams, Compiled]] = deque()
        self._failures: deque[GrammarError] = deque()
        self._compiler = GrammarCompiler(
            make_backend or (lambda: _backend_for(model, reasoning)),
            timeout_s=config.max_grammar_compile_s,
            max_cached=config.max_cached_grammars,
        )

    def on_ready(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def add(self, request: EngineRequest) -> bool:
        params = request.sampling_params.structured_outputs
        if params is None:
            return True
        self._followed[request.req_id] = _Followed(params, request.prompt_token_ids, list(request.output_token_ids))
        grammar = self._compiler.find(params)
        if grammar is not None:
            return self._start(request.req_id, grammar)
        waiting = self._waiting.setdefault(params, [])
        waiting.append(request.req_id)
        if len(waiting) == 1:
            self._has_come.clear()
            self._compiler.compile(params, self._take_compiled)
            if not self._compiles_beside:
                self._has_come.wait()
        return False

    def take_ready(self) -> Sequence[str]:
        """As `Grammar`; raises one failure per call, since each ends its own requests, and before any ready ids."""
        ready: list[str] = []
        while self._compiled and not self._failures:
            params, result = self._compiled.popleft()
            req_ids = [req_id for req_id in dict.fromkeys(self._waiting.pop(params, ())) if self._waits(req_id, params)]
            if not isinstance(result, Exception):
                ready += [req_id for req_id in req_ids if self._start(req_id, result)]
            elif req_ids:
                self._failures.append(_failure(result, req_ids))
        if ready:
            return ready
        while self._failures:
            error = self._failures.popleft()
            req_ids = [req_id for req_id in error.req_ids if req_id in self._followed]
            if req_ids:
                raise GrammarError(str(error), req_ids=req_ids) from error.__cause__
        return ready

    def constrains(self, req_id: str) -> bool:
        return req_id in self._followed

    def constrains_any(self, req_ids: Set[str]) -> bool:
        return not self._followed.keys().isdisjoint(req_ids)

    def accept(self, outputs: Sequence[EngineCoreOutput]) -> None:
        if not self._followed:
            return
        refused: dict[str, str] = {}
        for output in outputs:
            if output.finish_reason is not None:
                self._followed.pop(output.req_id, None)
            elif output.new_token_ids:
                followed = self._followed.get(output.req_id)
                why_not = "" if followed is None else _advance(followed, output.new_token_ids)
                if why_not:
                    refused[output.req_id] = why_not
        if refused:
            raise GrammarError("; ".join(dict.fromkeys(refused.values())), req_ids=list(refused))

    def bitmask(self, output: SchedulerOutput) -> GrammarOutput:
        if not self._followed:
            return GrammarOutput(step_id=output.step_id)
        req_ids = self._sampled(output)
        drafts = [output.scheduled_spec_decode_tokens.get(req_id, []) for req_id in req_ids]
        words = np.zeros((len(req_ids) + sum(map(len, drafts)), self._num_words), np.int32)
        row = 0
        for req_id, draft_token_ids in zip(req_ids, drafts, strict=True):
            rows = words[row : row + 1 + len(draft_token_ids)]
            row += len(rows)
            self._fill(req_id, draft_token_ids, rows)
        return GrammarOutput(
            step_id=output.step_id,
            structured_output_request_ids=req_ids,
            grammar_bitmask=words.tobytes(),
            num_words=self._num_words if req_ids else 0,
            num_rows=[1 + len(listed) for listed in drafts] if any(drafts) else [],
        )

    def close(self) -> None:
        self._compiler.close()

    def _take_compiled(self, params: StructuredOutputsParams, result: Compiled) -> None:
        self._compiled.append((params, result))
        self._has_come.set()
        self._wake()

    def _waits(self, req_id: str, params: StructuredOutputsParams) -> bool:
        """Whether a request still runs and waits for this constraint; its id may have been reused."""
        followed = self._followed.get(req_id)
        return followed is not None and followed.matcher is None and followed.params == params

    def _start(self, req_id: str, grammar: CompiledGrammar) -> bool:
        """Start the matcher of a request. False, with the failure queued, if its tokens violate the grammar."""
        followed = self._followed[req_id]
        followed.grammar = grammar
        try:
            if followed.start():
                return True
            error = GrammarError("it came with tokens that it does not allow", req_ids=[req_id])
        except Exception as cause:
            error = _failure(cause, [req_id])
        self._failures.append(error)
        return False

    def _sampled(self, output: SchedulerOutput) -> list[str]:
        """Constrained requests that sample in a step: those whose prompt it completes."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return [
            req_id
            for req_id, num_tokens in output.num_scheduled_tokens.items()
            if req_id in self._followed and computed[req_id] + num_tokens >= self._followed[req_id].num_tokens
        ]

    def _fill(self, req_id: str, drafts: Sequence[int], rows: np.ndarray) -> None:
        """Write the rows of the next token and after each draft token. Rows after a draft that the grammar rejects stay
        empty: no token sampled there is used.
        """
        followed = self._followed[req_id]
        matcher = followed.matcher
        assert matcher is not None, "a request runs after its grammar is compiled"
        try:
            matcher.fill(rows[0])
            if not _fill_after_drafts(matcher, drafts, rows[1:]):
                followed.start()
        except Exception as error:
            raise _failure(error, [req_id]) from error


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


def _advance(followed: _Followed, token_ids: Sequence[int]) -> str:
    """Accept new tokens. Returns why the request cannot go on; empty if it can."""
    matcher = followed.matcher
    assert matcher is not None, "a request has tokens after its grammar is compiled"
    followed.output_token_ids += token_ids
    try:
        is_accepted = matcher.accept(token_ids) == len(token_ids)
    except Exception as error:
        return str(error) or type(error).__name__
    return "" if is_accepted else "tokens came that it does not allow"


def _failure(cause: Exception, req_ids: list[str]) -> GrammarError:
    error = GrammarError(str(cause) or type(cause).__name__, req_ids=req_ids)
    error.__cause__ = cause
    return error


def _backend_for(model: ModelConfig, reasoning: ReasoningMarkers | None) -> GrammarBackend:
    """Create the grammar backend; loads the tokenizer again, since the core has none."""
    from penstock.structured.llguidance_backend import LLGuidanceBackend

    tokenizer = load_tokenizer(model.tokenizer_folder)
    as_json = tokenizer.as_json()
    if as_json is None:
        raise UnsupportedFeature("The model's tokenizer has no fast version, which structured outputs need.")
    eos_token_ids = model.eos_token_ids | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())
    backend = LLGuidanceBackend(as_json, model.vocab_size, eos_token_ids)
    if reasoning is None:
        return backend
    if reasoning == REASONING_PARSERS[HARMONY]:
        return HarmonyBackend(backend, HarmonyTokens.of(tokenizer), model.vocab_size, eos_token_ids)
    tokens = reasoning_tokens(tokenizer, reasoning)
    return ReasoningBackend(backend, tokens, model.vocab_size, eos_token_ids)


def reasoning_tokens(tokenizer: Tokenizer, markers: ReasoningMarkers) -> ReasoningTokens:
    start, end, *implied_ends = (
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for text in (markers.start, markers.end, *markers.implied_ends)
    )
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return ReasoningTokens(
        start,
        end,
        markers.starts_in_reasoning,
        partial(tokenizer.decode, skip_special_tokens=False),
        tuple(filter(None, implied_ends)),
        other_spellings(encode, markers.start),
        other_spellings(encode, markers.end),
    )
