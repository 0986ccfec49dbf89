"""Sampling kernels: truncation, draws and log-probabilities. Rows are independent.

The specification is plain torch; `kernels.triton` has faster versions for GPUs.
Suffixes: R logits rows, V vocabulary, S slots, N log-probabilities returned per row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.native import NATIVE
from penstock.kernels.random import TOKENS_PER_GROUP, gumbel_noise, token_bits
from penstock.kernels.triton import triton_runs

_NEG_INF = float("-inf")
_NUMBERS_AT_ONCE = 1 << 20


class ChosenTokens(NamedTuple):
    """token_ids_R int64, always within the vocabulary; has_failed_R bool: the row has no drawable token."""

    token_ids_R: Tensor
    has_failed_R: Tensor


def apply_temperature(logits_RV: Tensor, temperature_S: Tensor, slots_R: Tensor) -> Tensor:
    """Divide each row of float32 logits by its slot's temperature, in place. temperature_S: float32. slots_R: int64."""
    if _truncates_in_triton(logits_RV):
        from penstock.kernels.triton import truncation

        return truncation.apply_temperature(logits_RV, temperature_S, slots_R.contiguous())
    return logits_RV.div_(temperature_S.index_select(0, slots_R).unsqueeze(-1))


def mask_min_p(logits_RV: Tensor, min_p_S: Tensor, slots_R: Tensor) -> Tensor:
    """`mask_min_p_reference` with each slot's parameter. slots_R: int64."""
    if _truncates_in_triton(logits_RV):
        from penstock.kernels.triton import truncation

        return truncation.mask_min_p(logits_RV, min_p_S, slots_R.contiguous())
    return mask_min_p_reference(logits_RV, min_p_S.index_select(0, slots_R))


def mask_min_p_reference(logits_RV: Tensor, min_p_R: Tensor) -> Tensor:
    """Mask tokens whose probability is below min_p times the most likely one's; 0 masks none. float32, in place."""
    threshold_R1 = logits_RV.amax(dim=-1, keepdim=True) + min_p_R.log().unsqueeze(-1)
    return _drop_below(logits_RV, threshold_R1)


def mask_top_k_top_p(logits_RV: Tensor, top_k_S: Tensor, top_p_S: Tensor, slots_R: Tensor) -> Tensor:
    """`mask_top_k_top_p_reference` with each slot's parameters. slots_R: int64."""
    if _truncates_in_triton(logits_RV):
        from penstock.kernels.triton import truncation

        return truncation.mask_top_k_top_p(logits_RV, top_k_S, top_p_S, slots_R.contiguous())
    return mask_top_k_top_p_reference(logits_RV, top_k_S.index_select(0, slots_R), top_p_S.index_select(0, slots_R))


def mask_top_k_top_p_reference(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Keep the top_k most likely tokens, then of those the smallest set that holds top_p of the probability.

    top_k_R: int64 in 1..V, V keeps all. top_p_R: float32 in (0, 1], 1 keeps all. float32 logits, in place.
    Ties with the last kept token are kept too, so the result does not depend on the sort's order.
    """
    sorted_RV = _sort_descending(logits_RV)
    kth_R1 = sorted_RV.gather(-1, (top_k_R - 1).unsqueeze(-1))
    sorted_RV.masked_fill_(sorted_RV < kth_R1, _NEG_INF)
    probs_RV = sorted_RV.softmax(dim=-1)
    mass_before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    num_kept_R = _count(mass_before_RV < top_p_R.unsqueeze(-1)).clamp_(min=1)
    nucleus_R1 = sorted_RV.gather(-1, (num_kept_R - 1).unsqueeze(-1))
    # By rounding a cumulative sum can reach 1 before the end: top_p = 1 must keep all of top_k.
    threshold_R1 = torch.where(top_p_R.unsqueeze(-1) < 1.0, torch.maximum(kth_R1, nucleus_R1), kth_R1)
    return _drop_below(logits_RV, threshold_R1)


def _count(is_counted_RV: Tensor) -> Tensor:
    """Count per row, int64 [R]. Cast explicitly: torch's own cast inside the sum escapes the memory count."""
    return is_counted_RV.to(torch.int64).sum(dim=-1)


def _sort_descending(logits_RV: Tensor) -> Tensor:
    """Sort each row, NaN first. On the CPU by numpy, whose vectorised sort takes a tenth of torch's time."""
    if logits_RV.device.type == "cpu":
        return torch.from_numpy(np.sort(logits_RV.numpy(), axis=-1)[:, ::-1].copy())
    return logits_RV.sort(dim=-1, descending=True).values


def _drop_below(logits_RV: Tensor, threshold_R1: Tensor) -> Tensor:
    """Mask in place by a selection, several times as fast on a CPU as masked_fill."""
    return torch.where(logits_RV < threshold_R1, logits_RV.new_full((), _NEG_INF), logits_RV, out=logits_RV)


def greedy_tokens(logits_RV: Tensor) -> ChosenTokens:
    """Argmax of each row, the first of ties; NaN counts as largest. A row fails where its maximum is not finite."""
    if NATIVE is not None and NATIVE.runs(logits_RV) and logits_RV.is_contiguous():
        return ChosenTokens(*NATIVE.argmax(logits_RV)[:2])
    if _triton_takes(logits_RV):
        from penstock.kernels.triton.sampling import argmax

        return ChosenTokens(*argmax(logits_RV)[:2])
    return greedy_tokens_reference(logits_RV)


def greedy_tokens_reference(logits_RV: Tensor) -> ChosenTokens:
    """The specification of `greedy_tokens`.

    On the CPU by numpy, whose argmax is vectorised: a tenth of torch's time at 32 rows of 32,000.
    """
    if logits_RV.device.type == "cpu":
        logits = logits_RV.numpy()
        best = logits.argmax(axis=-1)
        has_failed = ~np.isfinite(logits[np.arange(len(best)), best])
        return ChosenTokens(torch.from_numpy(best), torch.from_numpy(has_failed))
    largest = logits_RV.max(dim=-1)
    return ChosenTokens(largest.indices, ~largest.values.isfinite())


class LargestLogits(NamedTuple):
    """Maximum of each row, the first of ties, NaN counting as largest: values_R float32, token_ids_R int64."""

    values_R: Tensor
    token_ids_R: Tensor


def largest_logits(logits_RV: Tensor) -> LargestLogits:
    """Local maxima of a vocabulary shard, for `merge_largest`."""
    if NATIVE is not None and NATIVE.runs(logits_RV) and logits_RV.is_contiguous():
        token_ids_R, _, values_R = NATIVE.argmax(logits_RV, with_largest=True)
        assert values_R is not None, "called with with_largest"
        return LargestLogits(values_R, token_ids_R)
    if _triton_takes(logits_RV):
        from penstock.kernels.triton.sampling import argmax

        token_ids_R, _, values_R = argmax(logits_RV)
        return LargestLogits(values_R, token_ids_R)
    token_ids_R = greedy_tokens(logits_RV).token_ids_R
    return LargestLogits(logits_RV.gather(-1, token_ids_R.unsqueeze(-1)).squeeze(-1), token_ids_R)


def merge_largest(values_RS: Tensor, token_ids_RS: Tensor) -> ChosenTokens:
    """Choose greedily from the maxima of vocabulary shards, in their order; the first of ties.

    values_RS: float32. token_ids_RS: int64, in the whole vocabulary. S: shards.
    """
    best = greedy_tokens(values_RS)
    return ChosenTokens(token_ids_RS.gather(-1, best.token_ids_R.unsqueeze(-1)).squeeze(-1), best.has_failed_R)


def draw_tokens(logits_RV: Tensor, seed_S: Tensor, slots_R: Tensor, positions_R: Tensor) -> ChosenTokens:
    """Sample each row with its slot's seed and its position. seed_S, slots_R, positions_R: int64."""
    if NATIVE is not None and NATIVE.runs(logits_RV) and logits_RV.is_contiguous() and positions_R.is_contiguous():
        return ChosenTokens(*NATIVE.draw(logits_RV, seed_S, slots_R, positions_R))
    if _triton_takes(logits_RV):
        from penstock.kernels.triton.sampling import draw

        return ChosenTokens(*draw(logits_RV, seed_S.contiguous(), slots_R.contiguous(), positions_R.contiguous()))
    return draw_tokens_reference(logits_RV, seed_S.index_select(0, slots_R), positions_R)


def draw_tokens_reference(logits_RV: Tensor, seeds_R: Tensor, positions_R: Tensor) -> ChosenTokens:
    """Sample each row by the Gumbel-max trick: the token with the largest sum of logit and Gumbel noise.

    Equivalent to sampling from softmax (Gumbel, 1954; Maddison, Tarlow and Minka, "A* Sampling", NeurIPS 2014). The
    noise belongs to the token (`kernels.random`): similar distributions draw alike with the same seed and position,
    which raises the acceptance of drafts. A row without a distribution fails: one with NaN or plus infinity, or with
    nothing but minus infinity. Tokens of probability 0 are never drawn. Ties go to the first token.
    """
    num_rows, size = logits_RV.shape
    # In parts, since the random numbers take several times the logits' memory.
    part = max(TOKENS_PER_GROUP, _NUMBERS_AT_ONCE // num_rows // TOKENS_PER_GROUP * TOKENS_PER_GROUP)
    best_R = torch.full((num_rows,), _NEG_INF, dtype=torch.float64, device=logits_RV.device)
    token_R = torch.zeros_like(positions_R)
    for first in range(0, size, part):
        logits_RP = logits_RV[:, first : first + part]
        noise_RP = gumbel_noise(token_bits(seeds_R, positions_R, first, logits_RP.shape[1]))
        largest = noise_RP.add_(logits_RP).max(dim=-1)
        # NaN counts as largest, and stays.
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
    """Log-probabilities of the sampled token and of the `num_logprobs` most likely ones; raw logits if not `normalize`.

    Only those are normalised, so no second [R, V] tensor is allocated. The rank counts logits at least as large.
    """
    if _triton_takes(logits_RV):
        from penstock.kernels.triton import sampling

        found = sampling.top_logprobs(logits_RV, sampled_R.contiguous(), num_logprobs, normalize=normalize)
        return LogprobsTensors(*found)
    sampled_R1 = sampled_R.unsqueeze(-1)
    sampled_logit_R1 = logits_RV.gather(-1, sampled_R1)
    top = logits_RV.topk(num_logprobs, dim=-1)
    token_ids_RN = torch.cat([sampled_R1, top.indices], dim=-1)
    chosen_RN = torch.cat([sampled_logit_R1, top.values], dim=-1)
    ranks_R = _count(logits_RV >= sampled_logit_R1)
    logprobs_RN = chosen_RN.float()
    if normalize:
        logprobs_RN = logprobs_RN - logits_RV.float().logsumexp(dim=-1, keepdim=True)
    return LogprobsTensors(token_ids_RN, logprobs_RN, ranks_R)


def can_be_drawn(logits_RV: Tensor) -> Tensor:
    """Whether a token can be drawn from float32 logits; bool [R]."""
    # amax propagates NaN.
    return logits_RV.amax(dim=-1).isfinite()


def failure_codes(has_failed_R: Tensor, raw_logits_RV: Tensor, spoilt_by_R: Tensor | None) -> Tensor:
    """0 where a row has not failed, 1 where no token can be drawn from its raw logits, else 2 + spoilt_by; int64.

    has_failed_R: bool. spoilt_by_R: int64; None for zeros.
    """
    if _triton_takes(raw_logits_RV):
        from penstock.kernels.triton import sampling

        return sampling.failure_codes(has_failed_R, raw_logits_RV, spoilt_by_R)
    is_drawable_R = can_be_drawn(raw_logits_RV).to(torch.int64)
    return has_failed_R * (1 + (is_drawable_R if spoilt_by_R is None else is_drawable_R * (1 + spoilt_by_R)))


def _triton_takes(logits_RV: Tensor) -> bool:
    if not triton_runs(logits_RV):
        return False
    from penstock.kernels.triton.sampling import takes

    return takes(logits_RV)


def _truncates_in_triton(logits_RV: Tensor) -> bool:
    if not triton_runs(logits_RV):
        return False
    from penstock.kernels.triton.truncation import takes

    return takes(logits_RV)
