"""Prompt lookup decoding: draft tokens that followed an earlier occurrence of the last n-gram.

Saxena, "Prompt Lookup Decoding" (2023). Suffixes: S slots, R requests of the step, L positions, D drafts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NO_DRAFT = -1


def look_up_reference(
    token_ids_RL: Tensor, num_tokens_R: Tensor, min_length: int, max_length: int, num_drafts: int
) -> Tensor:
    """Return the tokens after the longest earlier match of the last tokens; of equally long matches, the latest.

    token_ids_RL: int32, of which each row's first num_tokens_R (int64) are valid. Matches shorter than min_length are
    ignored; longer than max_length count as max_length. After a match near the end, its continuation is repeated
    periodically. Returns int32 [R, D], a row of NO_DRAFT without a match.
    """
    num_positions = token_ids_RL.shape[1]
    positions_L = torch.arange(num_positions, device=token_ids_RL.device)
    last_R1 = num_tokens_R.unsqueeze(-1) - 1
    agrees_RL = (positions_L < last_R1).expand(len(token_ids_RL), -1)
    length_RL = torch.zeros_like(agrees_RL, dtype=torch.int64)
    for back in range(max_length):
        shifted_RL = torch.roll(token_ids_RL, back, dims=1)
        token_R1 = token_ids_RL.gather(1, (last_R1 - back).clamp(min=0))
        agrees_RL = agrees_RL & (positions_L >= back) & (last_R1 >= back) & (shifted_RL == token_R1)
        length_RL = length_RL + agrees_RL
    score_RL = torch.where(length_RL >= min_length, length_RL * num_positions + positions_L, -1)
    best_R1 = score_RL.argmax(dim=1, keepdim=True)
    is_found_R1 = score_RL.gather(1, best_R1) >= 0
    period_R1 = (last_R1 - best_R1).clamp(min=1)
    offsets_RD = torch.arange(num_drafts, device=token_ids_RL.device) % period_R1
    drafts_RD = token_ids_RL.gather(1, (best_R1 + 1 + offsets_RD).clamp(max=num_positions - 1))
    return torch.where(is_found_R1, drafts_RD, NO_DRAFT)


def look_up(token_ids_L: np.ndarray, min_length: int, max_length: int, num_drafts: int) -> np.ndarray | None:
    """Look up one sequence on the host, int32 [tokens]: int32 [D], None without a match."""
    last = len(token_ids_L) - 1
    # Last positions of matches; longer matches are a subset.
    ends = np.flatnonzero(token_ids_L[:last] == token_ids_L[last])
    best, length = ends, 0
    while len(ends):
        best, length = ends, length + 1
        if length >= max_length:
            break
        ends = ends[ends >= length]
        ends = ends[token_ids_L[ends - length] == token_ids_L[last - length]]
    if length < min_length:
        return None
    start = int(best[-1]) + 1
    follows = token_ids_L[start : start + num_drafts]
    return follows if len(follows) == num_drafts else np.resize(follows, num_drafts)
