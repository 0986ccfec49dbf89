"""Stages of a server's start, with their times."""

from __future__ import annotations

import time
from collections.abc import Mapping


class StartStages:
    """Times of the stages of a start, which follow each other. began: of the first one, in monotonic seconds."""

    def __init__(self, began: float) -> None:
        self._began = self._last = began
        self._seconds: dict[str, float] = {}

    def end(self, stage: str, parts: Mapping[str, float] | None = None) -> None:
        """End a stage; the next one begins. parts: seconds of stages within it, which are its last."""
        now = time.monotonic()
        inner = dict(parts or {})
        own_s = max(0.0, now - self._last - sum(inner.values()))
        self._last = now
        for name, seconds in ((stage, own_s), *inner.items()):
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def whole_s(self) -> float:
        """Seconds since the start began."""
        return time.monotonic() - self._began

    def described(self) -> str:
        """Stages in a line, such as "configuration 0.2 s, model 3.1 s"."""
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items())
