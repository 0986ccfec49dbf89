"""How many drafts each request verifies in its next step."""

from __future__ import annotations

from penstock.scheduler.request import Request


class DraftBudget:
    """As many as there may be. num_speculative_tokens: of a request in a step, at most."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._most = num_speculative_tokens

    @property
    def num_wanted(self) -> int:
        """Drafts that workers make for each request, at most."""
        return self._most

    def num_for(self, request: Request) -> int:
        """Drafts that the request verifies in its next step, at most."""
        own = request.sampling_params.num_speculative_tokens
        return self._most if own is None else min(own, self._most)
