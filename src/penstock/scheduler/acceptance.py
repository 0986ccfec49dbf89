"""Acceptance statistics of draft tokens."""

from __future__ import annotations

from itertools import zip_longest

import msgspec


class Acceptance:
    """Decayed counts of draft tokens: accepted, and tried (accepted, or the first to be rejected)."""

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


class SpecDecodeMetrics(msgspec.Struct, kw_only=True):
    """Counters of speculative decoding.

    num_drafts: verified drafts: one per request and step with draft tokens.
    num_draft_tokens, num_accepted_tokens: their tokens, and the accepted ones.
    num_accepted_tokens_per_pos: accepted tokens by position in the draft.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the draft tokens; None without any."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Mean number of tokens per draft: the accepted ones, and one more; None without any."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """Acceptance rate by position in the draft."""
        return [count / self.num_drafts for count in self.num_accepted_tokens_per_pos]

    def note(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count the draft of one request in one step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        by_position = self.num_accepted_tokens_per_pos
        by_position += [0] * (num_draft_tokens - len(by_position))
        for position in range(num_accepted_tokens):
            by_position[position] += 1

    def add(self, other: SpecDecodeMetrics) -> None:
        """Add the counts of another object."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        mine, its = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        self.num_accepted_tokens_per_pos = [sum(pair) for pair in zip_longest(mine, its, fillvalue=0)]

    def since(self, earlier: SpecDecodeMetrics) -> SpecDecodeMetrics:
        """Return the difference to an earlier copy."""
        mine, its = self.num_accepted_tokens_per_pos, earlier.num_accepted_tokens_per_pos
        return SpecDecodeMetrics(
            num_drafts=self.num_drafts - earlier.num_drafts,
            num_draft_tokens=self.num_draft_tokens - earlier.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - earlier.num_accepted_tokens,
            num_accepted_tokens_per_pos=[now - before for now, before in zip_longest(mine, its, fillvalue=0)],
        )

    def describe(self) -> str:
        """Describe the counters in a line."""
        if not self.num_drafts:
            return "no drafts"
        by_position = ", ".join(f"{rate:.2f}" for rate in self.acceptance_rate_per_pos)
        return (
            f"{self.num_accepted_tokens:,} of {self.num_draft_tokens:,} drafts accepted ({self.acceptance_rate:.0%}), "
            f"{self.mean_acceptance_length:.2f} tokens per step with drafts; by position {by_position}"
        )
