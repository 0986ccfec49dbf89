"""Rules for rows that have a draft behind them. The exact one keeps what is drawn."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from penstock.kernels.sampling import ChosenTokens
from penstock.runner.logits_rows import LogitsRows


class Verification:
    """A draft is kept if it is the token that is drawn anyhow: no token ever changes.

    judges_greedy: whether a greedy request's tokens, too, are others than the largest logits. goes_by_probs: whether it
    makes a difference to know from which distributions drafts were drawn. keeps_what_cannot_be: whether it may keep a
    draft that the request's parameters forbid.
    """

    judges_greedy = False
    goes_by_probs = False
    keeps_what_cannot_be = False

    def bind(self, draft_token_ids: Tensor, draft_probs: Tensor | None) -> None:
        """draft_token_ids: int32 [slots, drafts], what a step verifies.

        draft_probs: float32 [slots, drafts, vocabulary], from which those were drawn; None where they were not, or
        where that is not kept.
        """

    def choose(
        self, drawn: ChosenTokens, logits: Tensor, rows: LogitsRows, seeds: Tensor, is_greedy_np: np.ndarray
    ) -> ChosenTokens:
        """What is said at each row of a step with drafts, which is then compared with them.

        logits: float32 [rows, vocabulary], from which was drawn. seeds: int64 [slots]. is_greedy_np: bool [rows].
        """
        return drawn


EXACT = Verification()
