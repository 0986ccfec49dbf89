"""Raising, lowering and forbidding tokens before anything is drawn. Plain torch; rows are independent.

Suffixes: R logits rows, V vocabulary, E entries (a token of a row each), S slots, L positions, P prefix tokens.
Logits are float32, contiguous, and changed in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NEG_INF = float("-inf")
# How a token's occurrences are kept in one int32: one bit for the prompt, the rest counts the output.
IN_PROMPT = 1 << 30
OUTPUT_COUNT = IN_PROMPT - 1


def add_to_tokens(logits_RV: Tensor, row_of_E: Tensor, token_E: Tensor, value_E: Tensor) -> Tensor:
    """Add float32 values to single tokens' logits; several entries may name the same token."""
    logits_RV.view(-1).index_add_(0, row_of_E * logits_RV.shape[1] + token_E, value_E)
    return logits_RV


def forbid_tokens(logits_RV: Tensor, row_of_E: Tensor, token_E: Tensor, is_forbidden_E: Tensor) -> Tensor:
    """Give minus infinity to the tokens whose entry says so; the number of those need not be known to the host."""
    flat_E = row_of_E * logits_RV.shape[1] + token_E
    # Several entries may name one token, so each must leave it no larger than it finds it.
    ceiling_E = torch.where(is_forbidden_E, _NEG_INF, float("inf"))
    logits_RV.view(-1).scatter_reduce_(0, flat_E, ceiling_E, "amin")
    return logits_RV


def keep_tokens(logits_RV: Tensor, rows: Tensor, row_of_E: Tensor, token_E: Tensor) -> Tensor:
    """Give minus infinity to all tokens of `rows` but those that an entry names."""
    flat_E = row_of_E * logits_RV.shape[1] + token_E
    kept_E = logits_RV.view(-1).index_select(0, flat_E)
    logits_RV.index_fill_(0, rows, _NEG_INF)
    logits_RV.view(-1).index_copy_(0, flat_E, kept_E)
    return logits_RV


def ends_with_prefix(
    token_ids_SL: Tensor, slot_E: Tensor, length_E: Tensor, begin_E: Tensor, prefix_EP: Tensor
) -> Tensor:
    """bool [E]: whether the tokens from `begin` on, of a sequence of `length`, end with the entry's prefix.

    token_ids_SL: int32. slot_E, length_E, begin_E: int64. prefix_EP: int64, aligned to the right; -1 left of it.
    """
    num_prefix = prefix_EP.shape[1]
    position_EP = length_E.unsqueeze(-1) + torch.arange(-num_prefix, 0, device=prefix_EP.device)
    is_inside_EP = position_EP >= begin_E.unsqueeze(-1)
    flat_EP = slot_E.unsqueeze(-1) * token_ids_SL.shape[1] + position_EP.clamp(min=0)
    token_EP = token_ids_SL.view(-1).index_select(0, flat_EP.view(-1)).view(flat_EP.shape)
    return ((prefix_EP < 0) | (is_inside_EP & (token_EP == prefix_EP))).all(dim=-1)


def penalise(
    logits_RV: Tensor, occurrences_RV: Tensor, repetition_R: Tensor, frequency_R: Tensor, presence_R: Tensor
) -> Tensor:
    """Make tokens that have occurred less likely.

    occurrences_RV: int32, IN_PROMPT if the prompt has the token, plus its count in the output.
    Repetition: Keskar et al., "CTRL", 2019, over prompt and output. Frequency and presence: the OpenAI API's, over
    the output.
    """
    has_occurred_RV = occurrences_RV != 0
    repetition_R1 = repetition_R.unsqueeze(-1)
    scaled_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    torch.where(has_occurred_RV, scaled_RV, logits_RV, out=logits_RV)
    count_RV = (occurrences_RV & OUTPUT_COUNT).to(torch.float32)
    logits_RV -= frequency_R.unsqueeze(-1) * count_RV
    logits_RV -= presence_R.unsqueeze(-1) * (count_RV > 0)
    return logits_RV
