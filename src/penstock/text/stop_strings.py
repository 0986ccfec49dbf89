"""Incremental search for stop strings.

The text ends where the first stop string is complete, across token boundaries; of two that are complete at the same
character, the one listed first counts. Text that may become a stop string is held back until that is decided.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Characters of a possible beginning that are compared before all of it.
_NUM_COMPARED_FIRST = 16


class StopStrings:
    """Stop strings of a request, which its choices share. Searches take time by the length of the undecided text."""

    __slots__ = ("_beginnings", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        characters = "".join(dict.fromkeys(stop[0] for stop in self._stops))
        self._beginnings = re.compile(f"[{re.escape(characters)}]")

    def may_begin(self, text: str) -> bool:
        """Whether the text has a character that a stop string begins with."""
        return self._beginnings.search(text) is not None

    def first(self, text: str, num_seen: int) -> tuple[int, str] | None:
        """Return the end of the stop string that is complete first, and the stop string; None if there is none.

        num_seen: length of the text's beginning, in which none counts.
        """
        found, last_end = None, len(text)
        for stop in self._stops:
            begin = text.find(stop, max(0, num_seen - len(stop) + 1), last_end)
            if begin >= 0:
                found = begin + len(stop), stop
                # Those listed later count only where they are complete earlier.
                last_end = found[0] - 1
        return found

    def num_undecided(self, text: str) -> int:
        """Length of the longest end of the text that further text may make a stop string."""
        longest = 0
        for stop in self._stops:
            begin = max(0, len(text) - len(stop) + 1)
            while (begin := text.find(stop[0], begin, len(text) - longest)) >= 0:
                is_likely = stop.startswith(text[begin : begin + _NUM_COMPARED_FIRST])
                if is_likely and stop.startswith(text[begin:]):
                    longest = len(text) - begin
                    break
                begin += 1
        return longest


class StopScanner:
    """Passes a text through up to the first stop string.

    includes_stop: whether the stop string itself is passed through. found: the stop string that ended the text.
    """

    __slots__ = ("_held", "_includes_stop", "_stops", "found")

    def __init__(self, stops: StopStrings, *, includes_stop: bool) -> None:
        self.found: str | None = None
        self._stops = stops
        self._includes_stop = includes_stop
        # The undecided end of the text: a stop string that is not complete begins here or later.
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """Take the next piece of text and return what is certain now.

        may_stop: whether a stop string that is complete within this piece counts.
        """
        if not self._held and not self._stops.may_begin(piece):
            return piece
        text = self._held + piece
        found = self._stops.first(text, len(self._held)) if may_stop else None
        if found is not None:
            end, self.found = found
            self._held = ""
            return text[: end if self._includes_stop else end - len(self.found)]
        num_certain = len(text) - self._stops.num_undecided(text)
        self._held = text[num_certain:]
        return text[:num_certain]

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        text, self._held = self._held, ""
        return text
