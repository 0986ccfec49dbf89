"""Deferral of SIGINT and SIGTERM to the end of a step, within which they could leave the core inconsistent."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

# Signals that end a process, if their handlers are Python's.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptsBetweenSteps:
    """Context manager of a loop of steps that defers a SIGINT or SIGTERM during a step to the end of the step.

    Installed once per loop, since installing handlers costs as much as a step's bookkeeping. Between steps, and for a
    second signal during one, the original handlers run at once. Does nothing outside the main thread, to which Python
    delivers signals, nor for a signal without a Python handler.
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
        """Run the handler of a signal that arrived during the step, if any."""
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
            # Another handler may have been installed over this one, and may still call it.
            if signal.getsignal(number) == self._take:
                signal.signal(number, handler)


class InterruptAfterwards(InterruptsBetweenSteps):
    """Context manager of a single step."""

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
