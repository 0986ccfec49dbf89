"""The engine's grammar advances by the tokens that the host has read, and makes bitmasks for drafts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.config import ModelConfig, StructuredOutputsConfig
from penstock.contract import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SamplingParams,
    SchedulerOutput,
    StructuredOutputsParams,
)
from penstock.engine.core.structured_grammar import StructuredGrammar
from penstock.engine.messages import EngineRequest
from penstock.errors import GrammarError
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.structured.backend import MatcherError
from support.constraints import END, NUM_WORDS, allowed_tokens, demo_backend, encode, matcher_for, tokens_of
from support.waiting import wait_until

PROMPT = [5, 6, 7]
DIGITS = {"regex": "[0-9]{4}"}
ONE, TWO, X = (encode(text)[0] for text in "12x")


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return ModelConfig.load("demo")


@pytest.fixture
def grammar(model: ModelConfig) -> Iterator[StructuredGrammar]:
    made = StructuredGrammar(model, StructuredOutputsConfig(), make_backend=demo_backend)
    yield made
    made.close()


def request(req_id: str, output: Sequence[int] = (), **fields: Any) -> EngineRequest:
    constraint = StructuredOutputsParams(**fields) if fields else None
    return EngineRequest(
        req_id=req_id,
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(seed=0, structured_outputs=constraint),
        output_token_ids=list(output),
    )


def added(grammar: StructuredGrammar, *requests: EngineRequest) -> None:
    """Add requests, and wait until all of them are ready."""
    waits_for = {one.req_id for one in requests if not grammar.add(one)}
    wait_until(lambda: not waits_for.difference_update(grammar.take_ready()) and not waits_for)


def decode_step(drafts: dict[str, list[int]] | None = None, **num_computed: int) -> SchedulerOutput:
    """One token of each request, and its drafts."""
    drafts = drafts or {}
    counts = {req_id: 1 + len(drafts.get(req_id, [])) for req_id in num_computed}
    return SchedulerOutput(
        step_id=7,
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(num_computed), num_computed_tokens=list(num_computed.values())
        ),
        num_scheduled_tokens=counts,
        scheduled_spec_decode_tokens=drafts,
    )


def prefill_step(req_id: str, num_computed: int, num_tokens: int) -> SchedulerOutput:
    new = NewRequestData(
        req_id=req_id,
        prompt_token_ids=PROMPT,
        prefill_token_ids=PROMPT,
        sampling_params=SamplingParams(),
        block_ids=([],),
        num_computed_tokens=num_computed,
    )
    return SchedulerOutput(step_id=7, scheduled_new_reqs=[new], num_scheduled_tokens={req_id: num_tokens})


def rows_of(answer: GrammarOutput) -> list[list[int]]:
    words = np.frombuffer(answer.grammar_bitmask, "<i4").reshape(-1, NUM_WORDS)
    return [tokens_of(row) for row in words]


def after(text: Sequence[int], **fields: Any) -> list[int]:
    """Tokens that a constraint allows after a prefix, by a matcher of its own."""
    matcher = matcher_for(**fields)
    assert matcher.accept(text) == len(text)
    return allowed_tokens(matcher)


def new_tokens(req_id: str, *token_ids: int, ends: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(req_id=req_id, new_token_ids=list(token_ids), finish_reason=ends)


def test_each_request_is_followed_by_its_own_tokens(grammar: StructuredGrammar) -> None:
    added(grammar, request("a", **DIGITS), request("b", regex="x+"), request("c"))
    assert [grammar.constrains(req_id) for req_id in "abc"] == [True, True, False]
    grammar.accept([new_tokens("a", ONE), new_tokens("b", X), new_tokens("c", X)])
    answer = grammar.bitmask(decode_step(a=3, b=3, c=3))
    assert answer.step_id == 7
    assert answer.structured_output_request_ids == ["a", "b"]
    assert answer.num_words == NUM_WORDS
    assert rows_of(answer) == [after([ONE], **DIGITS), after([X], regex="x+")]


def test_a_step_without_constrained_requests_has_no_bitmask_rows(grammar: StructuredGrammar) -> None:
    assert grammar.add(request("a"))
    assert grammar.bitmask(decode_step(a=3)) == GrammarOutput(step_id=7)


def test_a_request_that_comes_with_tokens_goes_on_behind_them(grammar: StructuredGrammar) -> None:
    added(grammar, request("a", [ONE, TWO], **DIGITS))
    assert rows_of(grammar.bitmask(decode_step(a=5))) == [after([ONE, TWO], **DIGITS)]


def test_a_part_of_a_prompt_has_no_row(grammar: StructuredGrammar) -> None:
    added(grammar, request("a", **DIGITS))
    assert grammar.bitmask(prefill_step("a", 0, 2)).structured_output_request_ids == []
    assert grammar.bitmask(prefill_step("a", 0, 3)).structured_output_request_ids == ["a"]
    assert grammar.bitmask(prefill_step("a", 2, 1)).structured_output_request_ids == ["a"]


def test_a_preempted_request_has_no_row_before_all_its_tokens_are_computed_again(grammar: StructuredGrammar) -> None:
    added(grammar, request("a", **DIGITS))
    grammar.accept([new_tokens("a", ONE), new_tokens("a", TWO)])
    assert grammar.bitmask(prefill_step("a", 0, 4)).structured_output_request_ids == []
    assert rows_of(grammar.bitmask(prefill_step("a", 0, 5))) == [after([ONE, TWO], **DIGITS)]


def test_each_draft_has_a_row_behind_it_and_leaves_nothing_behind(grammar: StructuredGrammar) -> None:
    added(grammar, request("a", **DIGITS), request("b", regex="x+"))
    answer = grammar.bitmask(decode_step({"a": [ONE, TWO]}, a=3, b=3))
    assert answer.num_rows == [3, 1]
    expected = [after([], **DIGITS), after([ONE], **DIGITS), after([ONE, TWO], **DIGITS), after([], regex="x+")]
    assert rows_of(answer) == expected
    assert rows_of(grammar.bitmask(decode_step(a=3))) == [after([], **DIGITS)]


@pytest.mark.parametrize("bad", [-1, X])
def test_after_a_draft_that_cannot_be_followed_nothing_is_allowed(grammar: StructuredGrammar, bad: int) -> None:
    added(grammar, request("a", **DIGITS))
    answer = grammar.bitmask(decode_step({"a": [ONE, bad, TWO]}, a=3))
    assert rows_of(answer) == [after([], **DIGITS), after([ONE], **DIGITS), [], []]
    assert rows_of(grammar.bitmask(decode_step(a=3))) == [after([], **DIGITS)]


def test_a_draft_of_the_end_is_followed_and_taken_back(grammar: StructuredGrammar) -> None:
    added(grammar, request("a", regex="1?"))
    answer = grammar.bitmask(decode_step({"a": [ONE, END]}, a=3))
    assert rows_of(answer) == [after([], regex="1?"), [END], [END]]
    assert rows_of(grammar.bitmask(decode_step(a=3))) == [after([], regex="1?")]


def test_several_tokens_of_one_step_are_taken_in(grammar: StructuredGrammar) -> None:
    added(grammar, request("a", **DIGITS))
    grammar.accept([new_tokens("a", ONE, TWO, ONE)])
    assert rows_of(grammar.bitmask(decode_step(a=6))) == [after([ONE, TWO, ONE], **DIGITS)]


@pytest.mark.parametrize("reason", list(FinishReason))
def test_who_ends_is_forgotten(grammar: StructuredGrammar, reason: FinishReason) -> None:
    added(grammar, request("a", **DIGITS))
    grammar.accept([new_tokens("a", X, ends=reason)])
    assert not grammar.constrains("a")
    assert grammar.bitmask(decode_step(a=3)) == GrammarOutput(step_id=7)
    added(grammar, request("a", regex="x+"))
    assert rows_of(grammar.bitmask(decode_step(a=3))) == [after([], regex="x+")]


def test_tokens_that_the_grammar_refuses_are_the_error_of_their_request_alone(grammar: StructuredGrammar) -> None:
    added(grammar, request("a", **DIGITS), request("b", **DIGITS))
    with pytest.raises(GrammarError, match="does not allow") as raised:
        grammar.accept([new_tokens("a", X), new_tokens("b", ONE)])
    assert raised.value.req_ids == ["a"]
    assert rows_of(grammar.bitmask(decode_step(b=4))) == [after([ONE], **DIGITS)]


def test_equal_constraints_are_compiled_once_and_then_there_at_once(model: ModelConfig) -> None:
    backend = demo_backend()
    compiled = []

    class Counting:
        def compile(self, params: StructuredOutputsParams) -> Any:
            compiled.append(params)
            return backend.compile(params)

    told: list[None] = []
    grammar = StructuredGrammar(model, StructuredOutputsConfig(), make_backend=Counting)
    grammar.on_ready(lambda: told.append(None))
    added(grammar, request("a", **DIGITS), request("b", **DIGITS))
    assert grammar.add(request("c", **DIGITS))
    assert len(compiled) == len(told) == 1
    grammar.close()


def test_a_failed_compilation_is_raised_once_and_for_its_remaining_requests_only(
    grammar: StructuredGrammar,
) -> None:
    bad = {"json": {"oneOf": [{"minimum": 3}, {"maximum": 5}]}}
    requests = [request("a", **bad), request("b", **DIGITS), request("c", **bad), request("d", **bad)]
    assert [grammar.add(one) for one in requests] == [False] * 4
    grammar.accept([new_tokens("d", ends=FinishReason.ABORT)])
    ready: list[str] = []
    errors: list[GrammarError] = []

    def has_heard_all() -> bool:
        try:
            ready.extend(grammar.take_ready())
        except GrammarError as error:
            errors.append(error)
        return bool(ready and errors)

    wait_until(has_heard_all)
    assert ready == ["b"]
    assert [error.req_ids for error in errors] == [["a", "c"]]
    assert "oneOf" in str(errors[0])
    grammar.accept([new_tokens(req_id, ends=FinishReason.ERROR) for req_id in "ac"])
    assert grammar.take_ready() == []


def test_a_reused_request_id_gets_its_own_grammar_and_failures(grammar: StructuredGrammar) -> None:
    bad = {"json": {"oneOf": [{"minimum": 3}, {"maximum": 5}]}}
    gone = new_tokens("a", ends=FinishReason.ABORT)
    for fields in (bad, {"regex": "x+"}, DIGITS):
        assert not grammar.add(request("a", **fields))
        grammar.accept([gone])
    assert not grammar.add(request("a", **DIGITS))
    ready: list[str] = []
    wait_until(lambda: bool(ready.extend(grammar.take_ready()) or ready))
    time.sleep(0.05)
    assert [*ready, *grammar.take_ready()] == ["a"]
    assert rows_of(grammar.bitmask(decode_step(a=3))) == [after([], **DIGITS)]
    added(grammar, request("b", **DIGITS))
    assert not grammar.add(request("c", [X], **DIGITS))
    grammar.accept([new_tokens("c", ends=FinishReason.ABORT)])
    assert grammar.take_ready() == []


def test_tokens_that_a_request_comes_with_must_be_the_grammars(grammar: StructuredGrammar) -> None:
    added(grammar, request("a", **DIGITS))
    assert not grammar.add(request("b", [X], **DIGITS))
    with pytest.raises(GrammarError, match="came with tokens") as raised:
        grammar.take_ready()
    assert raised.value.req_ids == ["b"]


def test_an_engine_without_constrained_requests_reads_no_tokenizer(model: ModelConfig) -> None:
    def make_backend() -> Any:
        raise AssertionError("the backend must not be created")

    grammar = StructuredGrammar(model, StructuredOutputsConfig(), make_backend=make_backend)
    assert grammar.add(request("a"))
    assert grammar.take_ready() == []
    grammar.accept([new_tokens("a", X)])
    grammar.close()


def test_a_matcher_that_fails_at_a_draft_fails_no_request(model: ModelConfig) -> None:
    """It is replaced by another one that knows the request's tokens."""

    class FailsOnce:
        """Wraps a backend, its grammars, and the first matcher, which fails when it is asked about drafts."""

        def __init__(self, wrapped: Any) -> None:
            self._wrapped = wrapped
            self._num_accepted = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._wrapped, name)

        def compile(self, params: StructuredOutputsParams) -> Any:
            return FailsOnce(self._wrapped.compile(params))

        def start(self, prompt_token_ids: Sequence[int] = ()) -> Any:
            started.append(prompt_token_ids)
            matcher = self._wrapped.start(prompt_token_ids)
            return FailsOnce(matcher) if len(started) == 1 else matcher

        def accept(self, token_ids: Sequence[int]) -> int:
            self._num_accepted += len(token_ids)
            return int(self._wrapped.accept(token_ids))

        def fill(self, words: np.ndarray) -> None:
            self._wrapped.fill(words)
            if self._num_accepted > 2:
                raise MatcherError("it is at a limit")

    started: list[Sequence[int]] = []
    grammar = StructuredGrammar(model, StructuredOutputsConfig(), make_backend=lambda: FailsOnce(demo_backend()))
    added(grammar, request("a", [ONE], **DIGITS))
    grammar.accept([new_tokens("a", TWO)])
    rows = rows_of(grammar.bitmask(decode_step({"a": [ONE, TWO]}, a=4)))
    assert rows == [after([ONE, TWO], **DIGITS), [], []]
    assert started == [PROMPT, PROMPT]
    assert rows_of(grammar.bitmask(decode_step({"a": [TWO]}, a=4))) == [
        after([ONE, TWO], **DIGITS),
        after([ONE, TWO, TWO], **DIGITS),
    ]
    grammar.close()
