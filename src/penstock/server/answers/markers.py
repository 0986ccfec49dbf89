"""Search of markers in text that comes in pieces."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable


class Markers:
    """Markers to find in a text, the longest first where several begin at one place."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({text for text in texts if text}, key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or "(?!)")

    def find(self, text: str, begin: int = 0, end: int = sys.maxsize) -> re.Match[str] | None:
        return self._pattern.search(text, begin, end)

    def at_start(self, text: str) -> str | None:
        """Marker with which a text begins."""
        found = self._pattern.match(text)
        return found.group() if found else None

    def may_start(self, text: str) -> bool:
        """Whether a text is the beginning of a marker, which its next characters may complete."""
        return any(len(text) < len(marker) and marker.startswith(text) for marker in self.texts)

    def num_kept(self, text: str) -> int:
        """Number of last characters that may begin a marker."""
        longest = max(map(len, self.texts), default=1) - 1
        for begin in range(max(0, len(text) - longest), len(text)):
            if self.may_start(text[begin:]):
                return len(text) - begin
        return 0
