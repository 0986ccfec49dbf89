"""When a draft is kept, other than by being the token that is drawn anyhow (`kernels.step_state.verify_drafts`).

These rules decide at each logits row what its request says there: the draft, or another token. That, compared with the
draft, is then verified as ever. Suffixes: S slots, L logits rows, each with a draft for its position, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.random import token_bits
from penstock.kernels.sampling import ChosenTokens, draw_tokens

# Random streams of a request besides the one that tokens and drafts are drawn with: other keys of the same generator.
_ACCEPTANCE_STREAM, _RESIDUAL_STREAM = 0x5851F42D4C957F2D, 0x14057B7EF767814F


def uniform_numbers(seeds_L: Tensor, positions_L: Tensor) -> Tensor:
    """float64 [L] in (0, 1), one for each (seed, position), independent of what tokens are drawn with. int64 both."""
    bits_L = token_bits(seeds_L ^ _ACCEPTANCE_STREAM, positions_L, 0, 1).squeeze(-1)
    return (bits_L.to(torch.float64) + 0.5) * 2.0**-32


def choose_by_rejection(
    logits_LV: Tensor,
    draft_token_ids_L: Tensor,
    draft_probs_LV: Tensor | None,
    seed_S: Tensor,
    slots_L: Tensor,
    positions_L: Tensor,
) -> ChosenTokens:
    """The draft with probability min(1, p / q), else a token drawn from max(p - q, 0), normalised: in all, one of p.

    Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318. p: softmax of the float32 logits. q:
    draft_probs_LV, float32, from which the drafts were drawn; None where the drafts were not drawn, and q is 1 for each
    of them. seed_S, slots_L, positions_L, draft_token_ids_L: int64. A row that has no distribution fails.
    """
    draft_L1 = draft_token_ids_L.unsqueeze(-1)
    probs_LV = logits_LV.softmax(dim=-1)
    of_draft_L = probs_LV.gather(-1, draft_L1).squeeze(-1)
    has_failed_L = ~of_draft_L.isfinite()
    if draft_probs_LV is None:
        drafted_L = torch.ones_like(of_draft_L)
        residual_LV = probs_LV.scatter(-1, draft_L1, 0.0)
    else:
        drafted_L = draft_probs_LV.gather(-1, draft_L1).squeeze(-1)
        residual_LV = (probs_LV - draft_probs_LV).clamp_(min=0.0)
    is_kept_L = uniform_numbers(seed_S.index_select(0, slots_L), positions_L) * drafted_L < of_draft_L
    others = draw_tokens(residual_LV.log_(), seed_S ^ _RESIDUAL_STREAM, slots_L, positions_L)
    # Where nothing is left besides the draft, it is kept, whatever rounding says.
    is_kept_L = is_kept_L | others.has_failed_R
    return ChosenTokens(torch.where(is_kept_L, draft_token_ids_L, others.token_ids_R), has_failed_L)


def choose_by_rate(
    drawn_L: Tensor, draft_token_ids_L: Tensor, rates_L: Tensor, seeds_L: Tensor, positions_L: Tensor, vocab_size: int
) -> Tensor:
    """The draft with probability rates_L (float64), whatever it is, else the token that was drawn, or its neighbour.

    Returns int64 [L]; all others but rates_L are int64.
    """
    is_kept_L = uniform_numbers(seeds_L, positions_L) < rates_L
    other_L = torch.where(drawn_L == draft_token_ids_L, (drawn_L + 1) % vocab_size, drawn_L)
    return torch.where(is_kept_L, draft_token_ids_L, other_L)
