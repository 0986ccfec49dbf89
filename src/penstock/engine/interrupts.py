"""Ctrl-C between steps instead of within one, where it could leave the core half-way."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class InterruptAfterwards:
    """Lets a `with` block finish before a SIGINT is acted on; a second one does not wait.

    Does nothing outside the main thread, where Python delivers no signals, and where SIGINT is not Python's to handle.
    """

    __slots__ = ("_frames", "_handler")

    def __enter__(self) -> None:
        self._handler: Any = None
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._frames: list[FrameType | None] = []
            self._handler = handler
            signal.signal(signal.SIGINT, self._remember)

    def _remember(self, _number: int, frame: FrameType | None) -> None:
        self._frames.append(frame)
        signal.signal(signal.SIGINT, self._handler)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._frames:
            self._handler(signal.SIGINT, self._frames[0])
