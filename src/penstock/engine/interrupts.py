"""Ctrl-C and SIGTERM between steps instead of within one, where they could leave the core half-way."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

# Signals that end a program, where it handles them in Python.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptsBetweenSteps:
    """For a loop of steps within its `with` block: a SIGINT or SIGTERM during a step is acted on when the step is done.

    Installed once for the whole loop, since that takes as long as much of a step's bookkeeping. Between steps, and for
    a second signal during one, everything is as without it. Does nothing outside the main thread, where Python delivers
    no signals, nor for a signal that is not Python's to handle.
    """

    __slots__ = ("_handlers", "_is_in_step", "_waiting")

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._is_in_step = False
        self._waiting: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._take)
        return self

    def begin_step(self) -> None:
        self._is_in_step = True

    def end_step(self) -> None:
        """Act on the signal that came during the step, if one did."""
        self._is_in_step = False
        if self._waiting:
            number, frame = self._waiting.pop()
            self._handlers[number](number, frame)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._is_in_step and not self._waiting:
            self._waiting.append((number, frame))
            return
        self._waiting.clear()
        self._handlers[number](number, frame)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._handlers or threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._handlers.items():
            # Another handler may have been put on top, and may call this one still.
            if signal.getsignal(number) == self._take:
                signal.signal(number, handler)


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
