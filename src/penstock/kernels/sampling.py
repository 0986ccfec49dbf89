"""Choosing tokens from logits: thresholds, the draw, log-probabilities. Plain torch; rows are independent.

Suffixes: R logits rows, V vocabulary, N log-probabilities returned per row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.native import NATIVE
from penstock.kernels.random import TOKENS_PER_GROUP, gumbel_noise, token_bits

_NEG_INF = float("-inf")
_NUMBERS_AT_ONCE = 1 << 20


class ChosenTokens(NamedTuple):
    """token_ids_R int64, always within the vocabulary; has_failed_R bool: the row has no token that could be chosen."""

    token_ids_R: Tensor
    has_failed_R: Tensor


def mask_min_p(logits_RV: Tensor, min_p_R: Tensor) -> Tensor:
    """Drop tokens whose probability is below min_p times the most likely one's; 0 drops none. float32, in place."""
    threshold_R1 = logits_RV.amax(dim=-1, keepdim=True) + min_p_R.log().unsqueeze(-1)
    return _drop_below(logits_RV, threshold_R1)


def mask_top_k_top_p(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Keep the top_k most likely tokens, then of those the smallest set that holds top_p of the probability.

    top_k_R: int64 in 1..V, V keeps all. top_p_R: float32 in (0, 1], 1 keeps all. float32 logits, in place.
    Tokens that tie with the last one kept are kept too, so the result does not depend on the sort's order.
    """
    sorted_RV = _sort_descending(logits_RV)
    kth_R1 = sorted_RV.gather(-1, (top_k_R - 1).unsqueeze(-1))
    sorted_RV.masked_fill_(sorted_RV < kth_R1, _NEG_INF)
    probs_RV = sorted_RV.softmax(dim=-1)
    mass_before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    num_kept_R = _count(mass_before_RV < top_p_R.unsqueeze(-1)).clamp_(min=1)
    nucleus_R1 = sorted_RV.gather(-1, (num_kept_R - 1).unsqueeze(-1))
    # A cumulative sum can reach 1 before the end by rounding: top_p = 1 must keep what top_k kept all the same.
    threshold_R1 = torch.where(top_p_R.unsqueeze(-1) < 1.0, torch.maximum(kth_R1, nucleus_R1), kth_R1)
    return _drop_below(logits_RV, threshold_R1)


def _count(is_counted_RV: Tensor) -> Tensor:
    """int64 [R]. Widened here, since torch does it inside of the sum, where no count of memory sees it."""
    return is_counted_RV.to(torch.int64).sum(dim=-1)


def _sort_descending(logits_RV: Tensor) -> Tensor:
    """Each row's logits, NaN first. On the CPU by numpy, whose sort is vectorised: a tenth of torch's time."""
    if logits_RV.device.type == "cpu":
        return torch.from_numpy(np.sort(logits_RV.numpy(), axis=-1)[:, ::-1].copy())
    return logits_RV.sort(dim=-1, descending=True).values


def _drop_below(logits_RV: Tensor, threshold_R1: Tensor) -> Tensor:
    """In place; a selection, since filling by a mask takes several times as long on a CPU."""
    return torch.where(logits_RV < threshold_R1, logits_RV.new_full((), _NEG_INF), logits_RV, out=logits_RV)


def greedy_tokens(logits_RV: Tensor) -> ChosenTokens:
    """The first of each row's largest logits; it fails where that is not finite, as NaN counts as largest.

    On the CPU by numpy, whose argmax is vectorised: a tenth of torch's time at 32 rows of 32,000.
    """
    if NATIVE is not None and NATIVE.runs(logits_RV) and logits_RV.is_contiguous():
        return ChosenTokens(*NATIVE.argmax(logits_RV)[:2])
    if logits_RV.device.type == "cpu":
        logits = logits_RV.numpy()
        best = logits.argmax(axis=-1)
        has_failed = ~np.isfinite(logits[np.arange(len(best)), best])
        return ChosenTokens(torch.from_numpy(best), torch.from_numpy(has_failed))
    largest = logits_RV.max(dim=-1)
    return ChosenTokens(largest.indices, ~largest.values.isfinite())


class LargestLogits(NamedTuple):
    """The first of each row's largest logits, NaN counting as largest: values_R float32, token_ids_R int64."""

    values_R: Tensor
    token_ids_R: Tensor


def largest_logits(logits_RV: Tensor) -> LargestLogits:
    """What parts of a vocabulary tell each other, so that `merge_largest` chooses as `greedy_tokens` of the whole."""
    if NATIVE is not None and NATIVE.runs(logits_RV) and logits_RV.is_contiguous():
        token_ids_R, _, values_R = NATIVE.argmax(logits_RV, with_largest=True)
        assert values_R is not None, "the largest were asked for"
        return LargestLogits(values_R, token_ids_R)
    token_ids_R = greedy_tokens(logits_RV).token_ids_R
    return LargestLogits(logits_RV.gather(-1, token_ids_R.unsqueeze(-1)).squeeze(-1), token_ids_R)


def merge_largest(values_RS: Tensor, token_ids_RS: Tensor) -> ChosenTokens:
    """The greedy choice from the largest logits of parts of the vocabulary, in their order: of equal ones, the first.

    values_RS: float32. token_ids_RS: int64, in the whole vocabulary. S: the parts.
    """
    best = greedy_tokens(values_RS)
    return ChosenTokens(token_ids_RS.gather(-1, best.token_ids_R.unsqueeze(-1)).squeeze(-1), best.has_failed_R)


def draw_tokens(logits_RV: Tensor, seed_S: Tensor, slots_R: Tensor, positions_R: Tensor) -> ChosenTokens:
    """Sample each row with the numbers of its slot's seed and its position. seed_S, slots_R, positions_R: int64."""
    if NATIVE is not None and NATIVE.runs(logits_RV) and logits_RV.is_contiguous() and positions_R.is_contiguous():
        return ChosenTokens(*NATIVE.draw(logits_RV, seed_S, slots_R, positions_R))
    return draw_tokens_reference(logits_RV, seed_S.index_select(0, slots_R), positions_R)


def draw_tokens_reference(logits_RV: Tensor, seeds_R: Tensor, positions_R: Tensor) -> ChosenTokens:
    """Sample each row by a race: of all tokens, the one with the largest sum of logit and Gumbel noise.

    Its probability is that of softmax (Gumbel, 1954; Maddison, Tarlow and Minka, "A* Sampling", NeurIPS 2014). The
    noise is a token's own (`kernels.random`): two distributions that are alike draw alike with the same seed and
    position, which is what makes a draft likely to be accepted. A row that has no distribution fails: one with NaN or
    plus infinity, or with nothing but minus infinity; a token of probability 0 is never drawn. Of equal sums, the first
    wins.
    """
    num_rows, size = logits_RV.shape
    # In parts, since the numbers take several times the logits' memory.
    part = max(TOKENS_PER_GROUP, _NUMBERS_AT_ONCE // num_rows // TOKENS_PER_GROUP * TOKENS_PER_GROUP)
    best_R = torch.full((num_rows,), _NEG_INF, dtype=torch.float64, device=logits_RV.device)
    token_R = torch.zeros_like(positions_R)
    for first in range(0, size, part):
        logits_RP = logits_RV[:, first : first + part]
        noise_RP = gumbel_noise(token_bits(seeds_R, positions_R, first, logits_RP.shape[1]))
        largest = noise_RP.add_(logits_RP).max(dim=-1)
        # What is not a number is the largest, and stays so.
        wins_R = ~(largest.values <= best_R) & ~best_R.isnan()
        best_R = torch.where(wins_R, largest.values, best_R)
        token_R = torch.where(wins_R, largest.indices + first, token_R)
    return ChosenTokens(token_R, ~best_R.isfinite())


class LogprobsTensors(NamedTuple):
    """token_ids_RN int64, logprobs_RN float32 (column 0 is the sampled token), ranks_R int64 (1-based)."""

    token_ids_RN: Tensor
    logprobs_RN: Tensor
    ranks_R: Tensor


def top_logprobs(logits_RV: Tensor, sampled_R: Tensor, num_logprobs: int, *, normalize: bool = True) -> LogprobsTensors:
    """Log-probabilities of the sampled token and of the `num_logprobs` most likely ones; logits if not normalised.

    Only those are normalised, so no second [R, V] tensor is made. The rank counts logits at least as large.
    """
    sampled_R1 = sampled_R.unsqueeze(-1)
    sampled_logit_R1 = logits_RV.gather(-1, sampled_R1)
    top = logits_RV.topk(num_logprobs, dim=-1)
    token_ids_RN = torch.cat([sampled_R1, top.indices], dim=-1)
    chosen_RN = torch.cat([sampled_logit_R1, top.values], dim=-1)
    logprobs_RN = chosen_RN.float()
    if normalize:
        logprobs_RN = logprobs_RN - logits_RV.float().logsumexp(dim=-1, keepdim=True)
    ranks_R = _count(logits_RV >= sampled_logit_R1)
    return LogprobsTensors(token_ids_RN, logprobs_RN, ranks_R)
