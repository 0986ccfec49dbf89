"""Threads that compile grammars outside the step loop, with a cache."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from penstock.contract import StructuredOutputsParams
from penstock.errors import InvalidParameter
from penstock.structured.backend import CompiledGrammar, GrammarBackend

logger = logging.getLogger(__name__)

# Result of a compilation: a grammar, or the error.
Compiled: TypeAlias = CompiledGrammar | Exception
_NUM_THREADS = 4
# Compilations at once, those beyond their timeout included.
_MOST_COMPILING = 16
_CLOSE_TIMEOUT_S = 1.0
# llguidance recurses over rules and definitions. It stops at 50,000 parts of a schema, which took less than 256 MiB of
# stack, and 10,000 rules of a grammar took less than 64 MiB. Unused stack takes no memory.
_STACK_BYTES = 512 << 20


class _Job(NamedTuple):
    params: StructuredOutputsParams
    on_result: Callable[[StructuredOutputsParams, Compiled], None]


class GrammarCompiler:
    """Compiler of grammars with a least-recently-used cache.

    make_backend: called once, in a thread, with the first constraint. timeout_s: timeout of one compilation.
    max_cached: size of the cache, in grammars.

    Compilations cannot be interrupted. After its timeout one goes on in a thread of its own, which blocks no other
    compilation, and the exit of the interpreter for timeout_s at most. While `_MOST_COMPILING` of them run, others are
    refused.
    """

    def __init__(self, make_backend: Callable[[], GrammarBackend], *, timeout_s: float, max_cached: int) -> None:
        self._make_backend = make_backend
        self._timeout_s = timeout_s
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._backend_lock = threading.Lock()
        self._backend: GrammarBackend | None = None
        self._cache: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        # Threads that are compiling.
        self._compiling: set[threading.Thread] = set()
        # Called at the exit of the interpreter.
        weakref.finalize(self, _end, self._closed, self._compiling, timeout_s)

    def find(self, params: StructuredOutputsParams) -> CompiledGrammar | None:
        """Return the cached grammar of a constraint; None if there is none."""
        with self._lock:
            grammar = self._cache.get(params)
            if grammar is not None:
                self._cache.move_to_end(params)
            return grammar

    def compile(
        self, params: StructuredOutputsParams, on_result: Callable[[StructuredOutputsParams, Compiled], None]
    ) -> None:
        """Compile a constraint. `on_result` is called in another thread, unless the compiler is closed.

        Raises RuntimeError where the system has no thread for it.
        """
        with self._lock:
            while len(self._threads) < _NUM_THREADS:
                thread = self._thread(self._serve, f"grammars-{len(self._threads)}")
                thread.start()
                self._threads.append(thread)
        self._jobs.put(_Job(params, on_result))

    @property
    def num_compiling(self) -> int:
        """Compilations that run, those beyond their timeout included."""
        return len(self._compiling)

    def close(self) -> None:
        """Stop the threads. Later results are dropped."""
        with self._lock:
            self._closed.set()
            threads, self._threads = self._threads, []
            self._cache.clear()
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(_CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            result = self._result_in_time(job.params)
            with self._lock:
                if self._closed.is_set():
                    return
                if not isinstance(result, Exception):
                    self._cache[job.params] = result
                    if len(self._cache) > self._max_cached:
                        self._cache.popitem(last=False)
            job.on_result(job.params, result)

    def _result_in_time(self, params: StructuredOutputsParams) -> Compiled:
        results: queue.SimpleQueue[Compiled] = queue.SimpleQueue()

        def run() -> None:
            try:
                results.put(self._result(params))
            finally:
                self._compiling.discard(thread)

        if self.num_compiling >= _MOST_COMPILING:
            return InvalidParameter(
                f"structured_outputs.{params.constraint} is refused: {self.num_compiling} earlier constraints are "
                f"still being compiled, most of them longer than {self._timeout_s:g} s (max_grammar_compile_s). Send "
                "it again later, and simpler constraints."
            )
        thread = self._thread(run, "grammar")
        try:
            self._start_with_deep_stack(thread)
        except RuntimeError as error:
            return error
        try:
            return results.get(timeout=self._timeout_s)
        except queue.Empty:
            return InvalidParameter(
                f"structured_outputs.{params.constraint} was not compiled within {self._timeout_s:g} s "
                "(max_grammar_compile_s). Make it simpler, or start the engine with more time."
            )

    def _start_with_deep_stack(self, thread: threading.Thread) -> None:
        with self._lock:
            if self._closed.is_set():
                raise RuntimeError("The compiler of grammars is closed.")
            self._compiling.add(thread)
            before = threading.stack_size(_STACK_BYTES)
            try:
                thread.start()
            except RuntimeError:
                self._compiling.discard(thread)
                raise
            finally:
                threading.stack_size(before)

    def _result(self, params: StructuredOutputsParams) -> Compiled:
        try:
            with self._backend_lock:
                self._backend = self._backend or self._make_backend()
            return self._backend.compile(params)
        except Exception as error:
            return error
        except BaseException as error:  # a panic of llguidance, which is no Exception
            return RuntimeError(f"{type(error).__name__}: {error}")

    @staticmethod
    def _thread(run: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=run, name=f"penstock-{name}", daemon=True)


def _end(closed: threading.Event, compiling: set[threading.Thread], timeout_s: float) -> None:
    """Drop later results, and wait for compilations.

    Python before 3.14 exits a thread that returns from C code during finalisation; unwinding the library's frames then
    ends the process with SIGSEGV.
    """
    closed.set()
    deadline = time.monotonic() + timeout_s
    for thread in list(compiling):
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in compiling):
        logger.warning(
            "A grammar is still being compiled %g s after the end of the program (max_grammar_compile_s), which may "
            "end it with SIGSEGV.",
            timeout_s,
        )
