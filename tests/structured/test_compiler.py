"""Constraints are compiled once each, by threads; a slow or hung compilation blocks no other."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.contract import StructuredOutputsParams
from penstock.errors import InvalidParameter
from penstock.structured.backend import Matcher
from penstock.structured.compiler import Compiled, GrammarCompiler

WAIT_S = 20.0


class Panic(BaseException):
    """Panic of a Rust library as PyO3 raises it."""


class FakeGrammar:
    def __init__(self, params: StructuredOutputsParams) -> None:
        self.params = params

    def start(self) -> Matcher:
        raise NotImplementedError


class FakeBackend:
    """Hangs over "hang" until it is let go, fails at "fail" and "panic", and writes down what it compiles."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.let_go = threading.Event()

    def compile(self, params: StructuredOutputsParams) -> FakeGrammar:
        assert params.regex is not None
        self.compiled.append(params.regex)
        if params.regex == "hang":
            self.let_go.wait(WAIT_S)
        if params.regex == "fail":
            raise InvalidParameter("no")
        if params.regex == "panic":
            raise Panic("assertion failed")
        return FakeGrammar(params)


class Waiting:
    """A compiler with its backend, and what it told."""

    def __init__(self, timeout_s: float = WAIT_S, max_cached: int = 2) -> None:
        self.backend = FakeBackend()
        self.told: queue.Queue[tuple[str | None, Compiled]] = queue.Queue()
        self.compiler = GrammarCompiler(lambda: self.backend, timeout_s=timeout_s, max_cached=max_cached)

    def compile(self, text: str) -> None:
        params = StructuredOutputsParams(regex=text)
        self.compiler.compile(params, lambda params, result: self.told.put((params.regex, result)))

    def next(self) -> tuple[str | None, Compiled]:
        return self.told.get(timeout=WAIT_S)

    def is_cached(self, text: str) -> bool:
        return self.compiler.find(StructuredOutputsParams(regex=text)) is not None


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    made = Waiting()
    yield made
    made.backend.let_go.set()
    made.compiler.close()


def test_a_grammar_is_there_once_it_was_told(waiting: Waiting) -> None:
    assert not waiting.is_cached("a")
    waiting.compile("a")
    text, grammar = waiting.next()
    assert text == "a"
    assert waiting.compiler.find(StructuredOutputsParams(regex="a")) is grammar
    assert waiting.compiler.find(StructuredOutputsParams(choice=("a",))) is None


def test_the_least_recently_used_goes_first(waiting: Waiting) -> None:
    for text in ("a", "b"):
        waiting.compile(text)
        waiting.next()
    assert waiting.is_cached("a")
    waiting.compile("c")
    waiting.next()
    assert [waiting.is_cached(text) for text in "abc"] == [True, False, True]


def test_a_failure_is_told_and_not_kept(waiting: Waiting) -> None:
    waiting.compile("fail")
    text, error = waiting.next()
    assert text == "fail"
    assert isinstance(error, InvalidParameter)
    assert not waiting.is_cached("fail")
    waiting.compile("a")
    assert waiting.next()[0] == "a"


def test_a_backend_that_cannot_be_made_is_told_too() -> None:
    told: queue.Queue[Compiled] = queue.Queue()

    def make_backend() -> FakeBackend:
        raise RuntimeError("no tokenizer")

    compiler = GrammarCompiler(make_backend, timeout_s=WAIT_S, max_cached=1)
    compiler.compile(StructuredOutputsParams(regex="a"), lambda _, result: told.put(result))
    assert str(told.get(timeout=WAIT_S)) == "no tokenizer"
    compiler.close()


def test_one_that_hangs_is_an_error_after_its_time_and_keeps_no_others_waiting() -> None:
    waiting = Waiting(timeout_s=0.2)
    for text in ("hang", "hang", "hang", "a"):
        waiting.compile(text)
    told = [waiting.next() for _ in range(4)]
    assert sorted(text or "" for text, _ in told) == ["a", "hang", "hang", "hang"]
    for text, result in told:
        if text == "hang":
            assert isinstance(result, InvalidParameter)
            assert "structured_outputs.regex was not compiled within 0.2 s" in str(result)
    waiting.backend.let_go.set()
    waiting.compiler.close()


def test_while_many_that_hang_are_compiled_others_are_refused() -> None:
    waiting = Waiting(timeout_s=0.01)
    for _ in range(20):
        waiting.compile("hang")
    results = [str(waiting.next()[1]) for _ in range(20)]
    assert sum("was not compiled within" in result for result in results) == 16
    assert sum("16 earlier constraints are still being compiled" in result for result in results) == 4
    waiting.backend.let_go.set()
    while waiting.compiler.num_compiling:
        time.sleep(0.01)
    waiting.compile("a")
    assert not isinstance(waiting.next()[1], Exception)
    waiting.compiler.close()


_PROGRAM = """
import sys, threading, time
from penstock.contract import StructuredOutputsParams
from penstock.structured.compiler import GrammarCompiler

begun = threading.Event()

class Backend:
    def compile(self, params):
        begun.set()
        time.sleep(float(sys.argv[1]))
        print("compiled", flush=True)

compiler = GrammarCompiler(Backend, timeout_s=float(sys.argv[2]), max_cached=1)
compiler.compile(StructuredOutputsParams(regex="a"), lambda *_: print("told", flush=True))
begun.wait()
"""


@pytest.mark.parametrize(
    ("takes_s", "timeout_s", "printed", "said"),
    [(0.5, 60.0, "compiled\n", ""), (60.0, 0.5, "", "A grammar is still being compiled 0.5 s after the end")],
)
def test_the_end_of_a_program_waits_for_a_library_and_no_longer_than_it_may_take(
    takes_s: float, timeout_s: float, printed: str, said: str
) -> None:
    """A library that comes back while the interpreter is finalised would end the process with SIGSEGV."""
    command = [sys.executable, "-c", _PROGRAM, str(takes_s), str(timeout_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (0, printed)
    assert said in done.stderr


def test_closing_waits_for_nothing_that_hangs_and_leaves_no_idle_threads() -> None:
    waiting = Waiting()
    before = threading.active_count()
    waiting.compile("a")
    waiting.next()
    assert threading.active_count() > before
    waiting.compiler.close()
    deadline = time.monotonic() + WAIT_S
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)

    hanging = Waiting()
    hanging.compile("hang")
    while not hanging.backend.compiled:
        time.sleep(0.01)
    begin = time.monotonic()
    hanging.compiler.close()
    assert time.monotonic() - begin < WAIT_S / 2
    hanging.backend.let_go.set()
    time.sleep(0.1)
    assert hanging.told.empty()


def test_nothing_is_made_before_there_is_something_to_compile() -> None:
    made = []
    before = threading.active_count()
    compiler = GrammarCompiler(lambda: made.append(1) or FakeBackend(), timeout_s=1.0, max_cached=1)  # type: ignore[func-returns-value]
    assert threading.active_count() == before
    compiler.close()
    assert not made


def test_a_panic_of_the_library_is_an_error_that_comes_at_once() -> None:
    waiting = Waiting()
    waiting.compile("panic")
    text, result = waiting.next()
    assert (text, str(result)) == ("panic", "Panic: assertion failed")
    waiting.compiler.close()
