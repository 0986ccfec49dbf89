"""Ctrl-C between steps instead of within one, where it could leave the core half-way."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class InterruptsBetweenSteps:
    """For a loop of steps within its `with` block: a SIGINT during a step is acted on when the step is done.

    Installed once for the whole loop, since that takes as long as much of a step's bookkeeping. Between steps, and for
    a second SIGINT during one, everything is as without it. Does nothing outside the main thread, where Python delivers
    no signals, and where SIGINT is not Python's to handle.
    """

    __slots__ = ("_handler", "_is_in_step", "_waiting")

    def __init__(self) -> None:
        self._handler: Any = None
        self._is_in_step = False
        self._waiting: list[FrameType | None] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._take)
        return self

    def begin_step(self) -> None:
        self._is_in_step = True

    def end_step(self) -> None:
        """Act on the SIGINT that came during the step, if one did."""
        self._is_in_step = False
        if self._waiting:
            self._handler(signal.SIGINT, self._waiting.pop())

    def _take(self, _number: int, frame: FrameType | None) -> None:
        if self._is_in_step and not self._waiting:
            self._waiting.append(frame)
            return
        self._waiting.clear()
        self._handler(signal.SIGINT, frame)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is None or threading.current_thread() is not threading.main_thread():
            return
        # Another handler may have been put on top, and may call this one still.
        if signal.getsignal(signal.SIGINT) == self._take:
            signal.signal(signal.SIGINT, self._handler)


class InterruptAfterwards(InterruptsBetweenSteps):
    """For a `with` block that is one step."""

    __slots__ = ()

    def __enter__(self) -> Self:
        super().__enter__()
        self.begin_step()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.end_step()
        finally:
            super().__exit__(exc_type, exc, traceback)
