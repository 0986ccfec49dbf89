"""How often drafts turned out to be right."""

from __future__ import annotations


class Acceptance:
    """Drafts that were accepted, and those that were tried: accepted, or the first to be rejected.

    Older ones count less.
    """

    __slots__ = ("accepted", "tried")

    def __init__(self, accepted: float = 0.0, tried: float = 0.0) -> None:
        self.accepted = accepted
        self.tried = tried

    def scale(self, factor: float) -> None:
        self.accepted *= factor
        self.tried *= factor

    def note(self, num_drafts: int, num_accepted: int) -> None:
        self.accepted += num_accepted
        self.tried += num_accepted + (num_accepted < num_drafts)
