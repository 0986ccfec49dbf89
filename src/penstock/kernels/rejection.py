"""Acceptance rules of drafts other than exact matching (`kernels.step_state.verify_drafts`).

Each rule decides the token of a logits row: the draft, or another one. The result is then compared with the draft as
usual. Suffixes: S slots, L logits rows, each with a draft for its position, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.random import token_bits
from penstock.kernels.sampling import ChosenTokens, draw_tokens

# Random streams of a request other than that of tokens and drafts: other keys of the same generator.
_ACCEPTANCE_STREAM, _RESIDUAL_STREAM = 0x5851F42D4C957F2D, 0x14057B7EF767814F


def uniform_numbers(seeds_L: Tensor, positions_L: Tensor) -> Tensor:
    """Uniform numbers by (seed, position), independent of the token stream: float64 [L] in (0, 1). Both are int64."""
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
    """Accept the draft with probability min(1, p / q), else draw a token from max(p - q, 0), normalised.

    The result has the distribution p. Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318. p: softmax of
    the float32 logits. q: draft_probs_LV, float32, distributions of the drafts; None for deterministic drafts, whose q
    is 1.
    seed_S, slots_L, positions_L, draft_token_ids_L: int64. A row without a distribution fails.
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
    # Without any other token the draft is accepted, whatever rounding gives.
    is_kept_L = is_kept_L | others.has_failed_R
    return ChosenTokens(torch.where(is_kept_L, draft_token_ids_L, others.token_ids_R), has_failed_L)


def choose_by_rate(
    drawn_L: Tensor, draft_token_ids_L: Tensor, rates_L: Tensor, seeds_L: Tensor, positions_L: Tensor, vocab_size: int
) -> Tensor:
    """Accept the draft with probability rates_L (float64), whatever it is, else take the drawn token, or its neighbour.

    Returns int64 [L]; all others but rates_L are int64.
    """
    is_kept_L = uniform_numbers(seeds_L, positions_L) < rates_L
    other_L = torch.where(drawn_L == draft_token_ids_L, (drawn_L + 1) % vocab_size, drawn_L)
    return torch.where(is_kept_L, draft_token_ids_L, other_L)
