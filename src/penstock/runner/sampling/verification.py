"""Interface of acceptance rules of drafts, and the exact rule."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from penstock.kernels.sampling import ChosenTokens
from penstock.runner.logits_rows import LogitsRows


class Verification:
    """Exact rule: accepts a draft if it equals the sampled token. Tokens never change.

    judges_greedy: the rule changes tokens of greedy requests too. goes_by_probs: the rule needs the draft's
    distributions. keeps_what_cannot_be: it may accept a draft that the request's parameters forbid.
    """

    judges_greedy = False
    goes_by_probs = False
    keeps_what_cannot_be = False

    def bind(self, draft_token_ids: Tensor, draft_probs: Tensor | None) -> None:
        """Set the drafts: draft_token_ids: int32 [slots, drafts], verified by the step.

        draft_probs: float32 [slots, drafts, vocabulary], distributions of the drafts; None where they are not kept.
        """

    def choose(
        self, drawn: ChosenTokens, logits: Tensor, rows: LogitsRows, seeds: Tensor, is_greedy_np: np.ndarray
    ) -> ChosenTokens:
        """Return the token of each row of a step with drafts; drafts equal to it are accepted.

        logits: float32 [rows, vocabulary], as sampled from. seeds: int64 [slots]. is_greedy_np: bool [rows].
        """
        return drawn


EXACT = Verification()
