"""Incremental search for stop strings.

The text ends where the first stop string is complete, across token boundaries; of two that are complete at the same
character, the one listed first counts. Text that may become a stop string is held back until that is decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """Aho-Corasick automaton of all stop strings, one transition per character (Aho and Corasick, 1975).

    A state is the longest suffix of the text that is a prefix of a stop string; `depth` is its length.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.depth = [0]
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        # Per state, the index of the stop string that ends there; `len(stops)` where none does.
        self._found = [len(self.stops)]
        for index, stop in enumerate(self.stops):
            self._insert(index, stop)
        self._link()

    def advance(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        following = self._next
        while state and character not in following[state]:
            state = self._fallback[state]
        return following[state].get(character, 0)

    def match(self, state: int) -> str | None:
        """Return the stop string that is complete in this state, or None."""
        index = self._found[state]
        return self.stops[index] if index < len(self.stops) else None

    def _insert(self, index: int, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._found.append(len(self.stops))
                self.depth.append(self.depth[state] + 1)
            state = self._next[state][character]
        self._found[state] = min(self._found[state], index)

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, successor in self._next[state].items():
                fallback = self.advance(self._fallback[state], character)
                self._fallback[successor] = fallback
                self._found[successor] = min(self._found[successor], self._found[fallback])
                waiting.append(successor)


class StopScanner:
    """Passes a text through up to the first stop string.

    includes_stop: whether the stop string itself is passed through. found: the stop string that ended the text.
    """

    __slots__ = ("_automaton", "_held", "_includes_stop", "_state", "found")

    def __init__(self, stops: Sequence[str], *, includes_stop: bool) -> None:
        self.found: str | None = None
        self._automaton = StopAutomaton(stops)
        self._includes_stop = includes_stop
        self._state = 0
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """Take the next piece of text and return what is certain now.

        may_stop: whether a stop string that is complete within this piece counts.
        """
        automaton, state = self._automaton, self._state
        for position, character in enumerate(piece):
            state = automaton.advance(state, character)
            found = automaton.match(state) if may_stop else None
            if found is not None:
                return self._end(self._held + piece[: position + 1], found)
        self._state = state
        text = self._held + piece
        num_certain = len(text) - automaton.depth[state]
        self._held = text[num_certain:]
        return text[:num_certain]

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        text, self._held = self._held, ""
        return text

    def _end(self, text: str, found: str) -> str:
        self.found = found
        self._held = ""
        return text if self._includes_stop else text[: len(text) - len(found)]
