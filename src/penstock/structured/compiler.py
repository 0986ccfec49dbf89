"""Compiles constraints beside the step loop, each once."""

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

# What a constraint came to: its grammar, or why there is none.
Compiled: TypeAlias = CompiledGrammar | Exception
_NUM_THREADS = 4
_CLOSE_TIMEOUT_S = 1.0
# Libraries follow rules and definitions by calling themselves. llguidance stops at 50,000 parts of a schema, for which
# 256 MiB were enough, and 64 MiB for 10,000 rules of a grammar; memory is taken for what is used of it.
_STACK_BYTES = 512 << 20


class _Job(NamedTuple):
    params: StructuredOutputsParams
    tell: Callable[[StructuredOutputsParams, Compiled], None]


class GrammarCompiler:
    """make_backend: called once, by a thread, when the first constraint comes. timeout_s: per constraint.
    max_cached: constraints whose grammars are kept; the least recently used go first.

    Libraries cannot be interrupted. A compilation that takes too long is left alone: it goes on in a thread of its own,
    which keeps no others waiting, and the end of the program no longer than timeout_s.
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
        # Threads within a library.
        self._compiling: set[threading.Thread] = set()
        # Called at the end of the program.
        weakref.finalize(self, _end, self._closed, self._compiling, timeout_s)

    def find(self, params: StructuredOutputsParams) -> CompiledGrammar | None:
        """The grammar of a constraint, if it is there."""
        with self._lock:
            grammar = self._cache.get(params)
            if grammar is not None:
                self._cache.move_to_end(params)
            return grammar

    def compile(
        self, params: StructuredOutputsParams, tell: Callable[[StructuredOutputsParams, Compiled], None]
    ) -> None:
        """Compile a constraint; `tell` is called with what it came to, from another thread, unless this is closed."""
        with self._lock:
            if not self._threads:
                self._threads = [self._thread(self._serve, f"grammars-{index}") for index in range(_NUM_THREADS)]
                for thread in self._threads:
                    thread.start()
        self._jobs.put(_Job(params, tell))

    def close(self) -> None:
        """Let the threads end. Nobody is told anything any more."""
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
            job.tell(job.params, result)

    def _result_in_time(self, params: StructuredOutputsParams) -> Compiled:
        results: queue.SimpleQueue[Compiled] = queue.SimpleQueue()

        def run() -> None:
            try:
                results.put(self._result(params))
            finally:
                self._compiling.discard(thread)

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

    @staticmethod
    def _thread(run: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=run, name=f"penstock-{name}", daemon=True)


def _end(closed: threading.Event, compiling: set[threading.Thread], timeout_s: float) -> None:
    """Report no result any more, and wait for what is being compiled.

    Python before 3.14 ends a thread that comes back from a library while the interpreter is finalised; the frames of
    the library that are unwound then end the process with SIGSEGV.
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
