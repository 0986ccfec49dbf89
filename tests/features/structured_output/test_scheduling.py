"""Scheduler side of structured output: it follows requests by their known tokens, and makes bitmasks for drafts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.config import EngineConfig
from penstock.contract import SamplingParams, SchedulerOutput, StructuredOutputsParams
from penstock.errors import UnsupportedFeature
from penstock.features.structured_output.messages import BitmaskPart
from penstock.features.structured_output.scheduling import StructuredOutputScheduling
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices
from penstock.structured.backend import MatcherError
from support.constraints import END, NUM_WORDS, allowed_tokens, demo_backend, encode, matcher_for, tokens_of
from support.waiting import wait_until

PROMPT = [5, 6, 7]
DIGITS = {"regex": "[0-9]{4}"}
BAD = {"json": {"type": "string", "minLength": 3, "maxLength": 2}}
ONE, TWO, X = (encode(text)[0] for text in "12x")


class Core:
    """The core and the scheduler as the feature knows them. waiting: requests that wait. ended: outputs of ends."""

    def __init__(self, config: EngineConfig, make_backend: Callable[[], Any] = demo_backend) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting: set[str] = set()
        self.ended: list[EngineCoreOutput] = []
        self.calls: deque[Callable[[], None]] = deque()
        self.num_calls = 0
        services: Any = SchedulerServices(config, self, lambda call: [], self.ended.extend, self.calls.append)  # type: ignore[arg-type]
        self.feature = StructuredOutputScheduling(services, make_backend)

    def wait_for(self, req_id: str, reason: str) -> None:
        self.waiting.add(req_id)

    def ready(self, req_id: str, reason: str) -> None:
        self.waiting.discard(req_id)

    def finish_requests(self, req_ids: Sequence[str], reason: FinishReason) -> list[EngineCoreOutput]:
        ended = [self.requests.pop(req_id) for req_id in req_ids if req_id in self.requests]
        for request in ended:
            self.waiting.discard(request.req_id)
            self.feature.request_ended(request)
        return [EngineCoreOutput(request.req_id, [], finish_reason=reason) for request in ended]

    def abort(self, req_id: str) -> None:
        self.finish_requests([req_id], FinishReason.ABORT)

    def add(self, req_id: str, output: Sequence[int] = (), **fields: Any) -> Request:
        constraint = StructuredOutputsParams(**fields) if fields else None
        params = SamplingParams(seed=0, structured_outputs=constraint)
        request = Request(req_id, PROMPT, params, output_token_ids=output)
        self.requests[req_id] = request
        self.feature.request_added(request)
        return request

    def run_calls(self) -> None:
        while self.calls:
            self.calls.popleft()()
            self.num_calls += 1

    def ready_all(self) -> None:
        """Wait until no request waits."""
        wait_until(lambda: (self.run_calls(), not self.waiting)[1])

    def bitmask(self, *req_ids: str, **drafts: list[int]) -> BitmaskPart | None:
        """The part of a step of these requests."""
        awaiting = [req_id for req_id in req_ids if req_id in self.requests]
        message = SchedulerOutput(step_id=7, awaiting_req_ids=awaiting, scheduled_spec_decode_tokens=drafts)
        return self.feature.sampling_part(message)

    def errors(self) -> dict[str, str]:
        return {output.req_id: output.error or "" for output in self.ended}


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return EngineConfig.create("demo", device="cpu")


@pytest.fixture
def core(config: EngineConfig) -> Iterator[Core]:
    made = Core(config)
    yield made
    made.feature.close()


def rows_of(part: BitmaskPart | None) -> list[list[int]]:
    assert part is not None
    words = np.frombuffer(part.bitmask, "<i4").reshape(-1, NUM_WORDS)
    return [tokens_of(row) for row in words]


def after(text: Sequence[int], **fields: Any) -> list[int]:
    """Tokens that a constraint allows after a prefix, by a matcher of its own."""
    matcher = matcher_for(**fields)
    assert matcher.accept(text) == len(text)
    return allowed_tokens(matcher)


def test_each_request_is_followed_by_its_own_tokens(core: Core) -> None:
    a, b, c = core.add("a", **DIGITS), core.add("b", regex="x+"), core.add("c")
    core.ready_all()
    assert [request.awaits_parts for request in (a, b, c)] == [True, True, False]
    a.all_token_ids.append(ONE)
    b.all_token_ids.append(X)
    part = core.bitmask("a", "b")
    assert part is not None
    assert (part.req_ids, part.rows) == (["a", "b"], [1, 1])
    assert rows_of(part) == [after([ONE], **DIGITS), after([X], regex="x+")]


def test_a_request_that_comes_with_tokens_goes_on_behind_them(core: Core) -> None:
    core.add("a", [ONE, TWO], **DIGITS)
    core.ready_all()
    assert rows_of(core.bitmask("a")) == [after([ONE, TWO], **DIGITS)]


def test_each_draft_has_a_row_behind_it_and_leaves_nothing_behind(core: Core) -> None:
    core.add("a", **DIGITS)
    core.add("b", regex="x+")
    core.ready_all()
    part = core.bitmask("a", "b", a=[ONE, TWO])
    assert part is not None
    assert part.num_rows == [3, 1]
    expected = [after([], **DIGITS), after([ONE], **DIGITS), after([ONE, TWO], **DIGITS), after([], regex="x+")]
    assert rows_of(part) == expected
    assert rows_of(core.bitmask("a")) == [after([], **DIGITS)]


@pytest.mark.parametrize("bad", [-1, X])
def test_after_a_draft_that_cannot_be_followed_nothing_is_allowed(core: Core, bad: int) -> None:
    core.add("a", **DIGITS)
    core.ready_all()
    assert rows_of(core.bitmask("a", a=[ONE, bad, TWO])) == [after([], **DIGITS), after([ONE], **DIGITS), [], []]
    assert rows_of(core.bitmask("a")) == [after([], **DIGITS)]


def test_a_draft_of_the_end_is_followed_and_taken_back(core: Core) -> None:
    core.add("a", regex="1?")
    core.ready_all()
    assert rows_of(core.bitmask("a", a=[ONE, END])) == [after([], regex="1?"), [END], [END]]
    assert rows_of(core.bitmask("a")) == [after([], regex="1?")]


def test_several_tokens_of_one_step_are_taken_in(core: Core) -> None:
    request = core.add("a", **DIGITS)
    core.ready_all()
    request.all_token_ids += [ONE, TWO, ONE]
    assert rows_of(core.bitmask("a")) == [after([ONE, TWO, ONE], **DIGITS)]


def test_a_request_that_ends_is_forgotten(core: Core) -> None:
    core.add("a", **DIGITS)
    core.ready_all()
    core.abort("a")
    assert core.feature.sampling_part(SchedulerOutput(step_id=7, awaiting_req_ids=["a"])) is None
    core.add("a", regex="x+")
    core.ready_all()
    assert rows_of(core.bitmask("a")) == [after([], regex="x+")]


def test_tokens_that_the_grammar_refuses_are_the_error_of_their_request_alone(core: Core) -> None:
    a, b = core.add("a", **DIGITS), core.add("b", **DIGITS)
    core.ready_all()
    a.all_token_ids.append(X)
    b.all_token_ids.append(ONE)
    assert rows_of(core.bitmask("a", "b")) == [after([ONE], **DIGITS)]
    assert core.errors() == {"a": "Its grammar failed: it has tokens that the constraint does not allow"}
    assert core.ended[0].finish_reason is FinishReason.ERROR


def test_equal_constraints_are_compiled_once_and_then_there_at_once(config: EngineConfig) -> None:
    backend = demo_backend()
    compiled = []

    class Counting:
        def compile(self, params: StructuredOutputsParams) -> Any:
            compiled.append(params)
            return backend.compile(params)

    core = Core(config, Counting)
    core.add("a", **DIGITS)
    core.add("b", **DIGITS)
    assert core.waiting == {"a", "b"}
    core.ready_all()
    core.add("c", **DIGITS)
    assert not core.waiting
    assert len(compiled) == 1
    core.feature.close()


def test_a_failed_compilation_ends_its_remaining_requests_only(core: Core) -> None:
    core.add("a", **BAD)
    core.add("b", **DIGITS)
    core.add("c", **BAD)
    core.add("d", **BAD)
    core.abort("d")
    core.ready_all()
    assert sorted(core.requests) == ["b"]
    assert sorted(core.errors()) == ["a", "c"]
    assert all(output.finish_reason is FinishReason.INVALID for output in core.ended)
    assert all("minLength" in error and "grammar failed" not in error for error in core.errors().values())


def test_a_tokenizer_that_allows_no_constraints_refuses_each_request(config: EngineConfig) -> None:
    def make_backend() -> Any:
        raise UnsupportedFeature("Structured outputs are not for this model")

    core = Core(config, make_backend)
    core.add("a", **DIGITS)
    core.ready_all()
    assert [output.finish_reason for output in core.ended] == [FinishReason.INVALID]
    assert core.errors() == {"a": "Structured outputs are not for this model"}
    core.feature.close()


def test_a_reused_request_id_gets_its_own_grammar_and_failures(core: Core) -> None:
    for fields in (BAD, {"regex": "x+"}, DIGITS):
        core.add("a", **fields)
        core.abort("a")
    core.add("a", **DIGITS)
    core.ready_all()
    # Grammars of aborted requests arrive too.
    wait_until(lambda: (core.run_calls(), core.num_calls == 3)[1])
    assert rows_of(core.bitmask("a")) == [after([], **DIGITS)]
    core.add("c", [X], **DIGITS)
    core.abort("c")
    core.add("c", **DIGITS)
    core.run_calls()
    assert not core.ended
    assert not core.waiting


class Waiting:
    """Wraps a backend, which compiles `DIGITS` once the event is set."""

    def __init__(self, is_due: threading.Event) -> None:
        self._is_due = is_due

    def compile(self, params: StructuredOutputsParams) -> Any:
        assert params.regex != DIGITS["regex"] or self._is_due.wait(60)
        return demo_backend().compile(params)


def test_a_request_waits_for_its_own_grammar_and_not_for_that_of_an_earlier_one_of_its_id(
    config: EngineConfig,
) -> None:
    is_due = threading.Event()
    core = Core(config, lambda: Waiting(is_due))
    core.add("a", regex="x+")
    core.abort("a")
    core.add("a", **DIGITS)
    wait_until(lambda: bool(core.calls))
    core.run_calls()
    assert core.waiting == {"a"}
    is_due.set()
    core.ready_all()
    assert rows_of(core.bitmask("a")) == [after([], **DIGITS)]
    core.feature.close()


def test_a_grammar_that_no_thread_could_compile_is_compiled_for_the_next_request(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            core.add("a", **DIGITS)
    core.abort("a")
    core.add("b", **DIGITS)
    core.ready_all()
    assert rows_of(core.bitmask("b")) == [after([], **DIGITS)]


def test_tokens_that_a_request_comes_with_must_be_the_grammars(core: Core) -> None:
    core.add("a", **DIGITS)
    core.ready_all()
    core.add("b", [X], **DIGITS)
    assert core.waiting == {"b"}, "it ends between two steps"
    core.run_calls()
    assert core.errors() == {"b": "Its grammar failed: it has tokens that the constraint does not allow"}


def test_an_engine_without_constrained_requests_reads_no_tokenizer(config: EngineConfig) -> None:
    def make_backend() -> Any:
        raise AssertionError("the backend must not be created")

    core = Core(config, make_backend)
    core.add("a")
    assert not core.waiting
    core.feature.close()


class Failing:
    """Wraps a backend, its grammars and matchers, which fail to write a bitmask after so many tokens."""

    def __init__(self, wrapped: Any, after: int, started: list[Sequence[int]], num_failing: int = 1) -> None:
        self._wrapped, self._after, self._started, self._num_failing = wrapped, after, started, num_failing
        self._num_accepted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def compile(self, params: StructuredOutputsParams) -> Any:
        return Failing(self._wrapped.compile(params), self._after, self._started, self._num_failing)

    def start(self, prompt_token_ids: Sequence[int] = ()) -> Any:
        self._started.append(prompt_token_ids)
        matcher = self._wrapped.start(prompt_token_ids)
        return Failing(matcher, self._after, []) if len(self._started) <= self._num_failing else matcher

    def accept(self, token_ids: Sequence[int]) -> int:
        self._num_accepted += len(token_ids)
        return int(self._wrapped.accept(token_ids))

    def fill(self, words: np.ndarray) -> None:
        self._wrapped.fill(words)
        if self._num_accepted > self._after:
            raise MatcherError("it is at a limit")


def test_a_matcher_that_fails_at_a_draft_fails_no_request(config: EngineConfig) -> None:
    """It is replaced by another one that knows the request's tokens."""
    started: list[Sequence[int]] = []
    core = Core(config, lambda: Failing(demo_backend(), 2, started))
    request = core.add("a", [ONE], **DIGITS)
    core.ready_all()
    request.all_token_ids.append(TWO)
    assert rows_of(core.bitmask("a", a=[ONE, TWO])) == [after([ONE, TWO], **DIGITS), [], []]
    assert started == [PROMPT, PROMPT]
    assert rows_of(core.bitmask("a", a=[TWO])) == [after([ONE, TWO], **DIGITS), after([ONE, TWO, TWO], **DIGITS)]
    core.feature.close()


def test_a_matcher_that_fails_ends_its_request_and_others_keep_their_rows(config: EngineConfig) -> None:
    core = Core(config, lambda: Failing(demo_backend(), 1, []))
    request = core.add("a", [ONE], **DIGITS)
    core.ready_all()
    core.add("b", regex="x+")
    core.ready_all()
    request.all_token_ids.append(TWO)
    part = core.bitmask("a", "b")
    assert part is not None
    assert part.req_ids == ["b"]
    assert rows_of(part) == [after([], regex="x+")]
    assert core.errors() == {"a": "Its grammar failed: it is at a limit"}
    core.feature.close()
