"""Streams of one request's outputs from the core's thread to a coroutine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType

from penstock.contract import RequestOutputKind
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.output.progress import Progress
from penstock.errors import PenstockError


class StreamLock:
    """Lock for changing and reading progress, whose release wakes the coroutines of the streams with new outputs.

    Each event loop is woken once for all its streams.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._with_news: list[OutputStream] = []
        self._orphans: list[OutputStream] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        streams, self._with_news = self._with_news, []
        self._lock.release()
        if streams:
            self._wake(streams)

    def notify(self, stream: OutputStream) -> None:
        """Wake the stream when the lock, which must be held, is released."""
        self._with_news.append(stream)

    def take_orphans(self) -> list[OutputStream]:
        """Return and clear the streams whose event loops were closed."""
        orphans, self._orphans = self._orphans, []
        return orphans

    def _wake(self, streams: list[OutputStream]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[OutputStream]] = {}
        for stream in streams:
            by_loop.setdefault(stream.loop, []).append(stream)
        for loop, ready in by_loop.items():
            try:
                loop.call_soon_threadsafe(_set_all, ready)
            except RuntimeError:
                self._orphans += ready


def _set_all(streams: list[OutputStream]) -> None:
    for stream in streams:
        stream.wake.set()


class OutputStream:
    """Inbox of one request, read by one coroutine of the running event loop.

    It queues no outputs: a slow reader gets everything since its last read in one.
    """

    def __init__(self, kind: RequestOutputKind, lock: StreamLock) -> None:
        self.loop = asyncio.get_running_loop()
        self.wake = asyncio.Event()
        # Set once the core has the request.
        self.progress: Progress | None = None
        # Whether the reader has the last output.
        self.is_over = False
        self._kind = kind
        self._lock = lock
        self._is_admitted = False
        self._has_news = False
        self._has_output = False
        self._error: Exception | None = None
        self._watch: asyncio.TimerHandle | None = None

    def append(self, progress: Progress, /) -> None:
        """Note that the request has progressed; the lock is held."""
        self._is_admitted = True
        if progress.finished or self._kind is not RequestOutputKind.FINAL_ONLY:
            self._has_output = True
            self._notify()

    def admit(self) -> None:
        """Note that the core has admitted the request; the lock is held."""
        self._is_admitted = True
        self._notify()

    def fail(self, error: Exception) -> None:
        """Raise this error in the reader, unless the request has ended; the lock is held."""
        self._error = error
        self._notify()

    def watch(self, interval_s: float, check: Callable[[str], None]) -> None:
        """Call `check` every `interval_s` seconds; its error is raised in the reader."""
        self._watch = self.loop.call_later(interval_s, self._check, interval_s, check)

    def end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _check(self, interval_s: float, check: Callable[[str], None]) -> None:
        try:
            check("generate")
        except PenstockError as error:
            with self._lock:
                self.fail(error)
        else:
            self.watch(interval_s, check)

    async def next(self) -> RequestOutput:
        """Wait for the next output. Raises the error of the request or the engine."""
        while True:
            await self.wake.wait()
            self.wake.clear()
            with self._lock:
                self._has_news = False
                if not self._has_output and self._error is None:
                    continue
                progress = self.progress
                if progress is None or not progress.awaits_check:
                    self._has_output = False
                    return self._take()
            await asyncio.to_thread(progress.check)
            self.wake.set()

    async def admission(self) -> None:
        """Wait until the core has admitted the request. Raises the error of a refusal, or of the engine."""
        while not self._is_admitted:
            await self.wake.wait()
            with self._lock:
                if self._error is not None:
                    self._take()
                if not self._is_admitted:
                    self.wake.clear()
                    self._has_news = False

    def _take(self) -> RequestOutput:
        progress = self.progress
        if self._error is not None and not (progress is not None and progress.finished):
            self.is_over = True
            raise self._error
        assert progress is not None, "a stream without an error is notified after its progress is set"
        self.is_over = progress.finished
        return progress.take_output() if self._kind is RequestOutputKind.DELTA else progress.output()

    def _notify(self) -> None:
        if not self._has_news:
            self._has_news = True
            self._lock.notify(self)
