"""Temperature, min-p, top-k and top-p in Triton. Suffixes: R logits rows, V vocabulary, S slots.

The threshold of top-k and top-p is found without a sort. Logits are compared as integers of the same order
(`_order_of`). A first pass over a row bounds the threshold from below, a second one writes the few logits above the
bound to a list of candidates, and a search over their 32 bits finds the exact value, with three pivots per pass. A row
is one program's, so sums of probabilities do not depend on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens that a program takes at a time: where it reads a row, lists candidates, and searches among them.
_TOKENS_AT_ONCE = 16384
_TOKENS_LISTED = 8192
_CANDIDATES_AT_ONCE = 4096
# Tokens of a part of a row.
_TOKENS_OF_PART = 4096

# Orders (`_order_of`): below all, of NaN, and of minus infinity.
_LOWEST = tl.constexpr(-(1 << 31))
_NAN = tl.constexpr((1 << 31) - 1)
_MINUS_INFINITY = tl.constexpr(-0x7F800001)
# Accuracy of the bound of top-k, in orders: 2^-8 of the value. It may be too low, never too high.
_BOUND_ACCURACY = tl.constexpr(1 << 15)


def takes(logits_RV: Tensor) -> bool:
    """Whether the kernels support these logits."""
    return logits_RV.dtype == torch.float32 and logits_RV.dim() == 2 and logits_RV.stride(1) == 1


def apply_temperature(logits_RV: Tensor, temperature_S: Tensor, slots_R: Tensor) -> Tensor:
    """`kernels.sampling.apply_temperature`, in place. temperature_S: float32, slots_R: int64; contiguous."""
    num_rows, size = logits_RV.shape
    _divide_row[(num_rows, triton.cdiv(size, _TOKENS_OF_PART))](
        logits_RV, temperature_S, slots_R, logits_RV.stride(0), size, BLOCK=_TOKENS_OF_PART, num_warps=8
    )
    return logits_RV


def mask_min_p(logits_RV: Tensor, min_p_S: Tensor, slots_R: Tensor) -> Tensor:
    """`kernels.sampling.mask_min_p`, in place. min_p_S: float32, slots_R: int64; contiguous."""
    num_rows, size = logits_RV.shape
    _mask_min_p[(num_rows,)](
        logits_RV, min_p_S, slots_R, logits_RV.stride(0), size, BLOCK=_TOKENS_AT_ONCE, num_warps=16
    )
    return logits_RV


def mask_top_k_top_p(logits_RV: Tensor, top_k_S: Tensor, top_p_S: Tensor, slots_R: Tensor) -> Tensor:
    """`kernels.sampling.mask_top_k_top_p`, in place. top_k_S, slots_R: int64, top_p_S: float32; contiguous."""
    num_rows, size = logits_RV.shape
    candidates_RV = torch.empty((num_rows, size), dtype=torch.int32, device=logits_RV.device)
    _mask_top_k_top_p[(num_rows,)](
        logits_RV,
        top_k_S,
        top_p_S,
        slots_R,
        candidates_RV,
        logits_RV.stride(0),
        size,
        BLOCK=_TOKENS_AT_ONCE,
        LISTED=_TOKENS_LISTED,
        CANDIDATES=_CANDIDATES_AT_ONCE,
        num_warps=16,
    )
    return logits_RV


@triton.jit
def _order_of(value):
    """int32 with the order of float32 values; both zeros are equal, and NaN is largest."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & _NAN)
    return tl.where(value != value, _NAN, order)


@triton.jit
def _value_of(order):
    bits = order ^ ((order >> 31) & _NAN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _largest_of_lanes(row_ptr, num_tokens, BLOCK: tl.constexpr):
    """Order of the largest logit of each lane; _LOWEST where it has none."""
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), _LOWEST, tl.int32)
    for first in range(0, num_tokens, BLOCK):
        mask = first + lane < num_tokens
        logit = tl.load(row_ptr + first + lane, mask=mask, other=0.0)
        largest = tl.maximum(largest, tl.where(mask, _order_of(logit), _LOWEST))
    return largest


@triton.jit
def _drop_below(row_ptr, num_tokens, threshold, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    dropped = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        mask = first + lane < num_tokens
        logit = tl.load(row_ptr + first + lane, mask=mask, other=0.0)
        tl.store(row_ptr + first + lane, dropped, mask=mask & (logit < threshold))


@triton.jit(do_not_specialize=["slots_ptr"])
def _divide_row(logits_ptr, temperature_ptr, slots_ptr, row_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperature_ptr + tl.load(slots_ptr + row))
    mask = token < tl.where(temperature == 1.0, 0, size)
    logit = tl.load(logits_ptr + row * row_stride + token, mask=mask, other=0.0)
    # Rounded like torch's division.
    quotient = tl.div_rn(logit, tl.zeros((BLOCK,), tl.float32) + temperature)
    tl.store(logits_ptr + row * row_stride + token, quotient, mask=mask)


@triton.jit(do_not_specialize=["slots_ptr"])
def _mask_min_p(logits_ptr, min_p_ptr, slots_ptr, row_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    min_p = tl.load(min_p_ptr + tl.load(slots_ptr + row))
    num_tokens = tl.where(min_p > 0.0, size, 0)
    largest = tl.max(_largest_of_lanes(row_ptr, num_tokens, BLOCK), axis=0)
    _drop_below(row_ptr, num_tokens, _value_of(largest) + tl.log(min_p), BLOCK)


@triton.jit(do_not_specialize=["slots_ptr"])
def _mask_top_k_top_p(
    logits_ptr,
    top_k_ptr,
    top_p_ptr,
    slots_ptr,
    candidates_ptr,
    row_stride,
    size,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    candidates_ptr += row * size
    slot = tl.load(slots_ptr + row)
    top_k = tl.load(top_k_ptr + slot).to(tl.int32)
    top_p = tl.load(top_p_ptr + slot)
    num_tokens = tl.where((top_k < size) | (top_p < 1.0), size, 0)

    largest_of_lanes = _largest_of_lanes(row_ptr, num_tokens, BLOCK)
    largest = tl.max(largest_of_lanes, axis=0)
    largest_logit = _value_of(largest)
    has_probs = tl.abs(largest_logit) < float("inf")
    # Without probabilities top-p keeps the largest logits only, and all if one is NaN.
    seeks_k = (top_k < size) & (has_probs | (top_p == 1.0))
    seeks_p = has_probs & (top_p < 1.0)
    shift = tl.where(has_probs, largest_logit, 0.0)

    # Each lane has a logit of at least its maximum, so that the k-th largest maximum bounds the k-th largest logit.
    above_all = largest.to(tl.int64) + 1
    low = tl.zeros((), tl.int64) + _MINUS_INFINITY
    high = tl.where(seeks_k & (top_k <= BLOCK), above_all, low)
    while high - low > _BOUND_ACCURACY:
        middle = (low + high) >> 1
        reaches = tl.sum((largest_of_lanes > (middle - 1).to(tl.int32)).to(tl.int32), axis=0) >= top_k
        low = tl.where(reaches, middle, low)
        high = tl.where(reaches, high, middle)
    # All tokens less likely than the average of 1 - top_p over the vocabulary have less than 1 - top_p together.
    has_lane = largest_of_lanes > _MINUS_INFINITY
    mass_of_lanes = tl.sum(tl.where(has_lane, tl.exp(_value_of(largest_of_lanes) - shift), 0.0), axis=0)
    bound_of_top_p = _order_of(shift + tl.log((1.0 - top_p) * mass_of_lanes / size) - 0.01)
    bound = tl.where(seeks_k, low.to(tl.int32), bound_of_top_p)
    bound = tl.minimum(tl.maximum(bound, _MINUS_INFINITY + 1), largest)

    num_candidates, mass = _list_candidates(
        row_ptr, candidates_ptr, tl.where(seeks_k | seeks_p, size, 0), bound, shift, LISTED
    )

    # If fewer are above minus infinity than k, the k-th largest is minus infinity.
    low = tl.where(num_candidates >= top_k, bound.to(tl.int64), low * 0 + _MINUS_INFINITY)
    high = tl.where(seeks_k & (num_candidates >= top_k), above_all, low)
    kth = _kth_largest(candidates_ptr, num_candidates, low, high, top_k, CANDIDATES)
    if seeks_k & seeks_p:
        mass = _mass_from(candidates_ptr, num_candidates, kth, shift, CANDIDATES)

    low = tl.where(seeks_k, kth, bound.to(tl.int64))
    high = tl.where(seeks_p, above_all, low)
    nucleus = _nucleus(candidates_ptr, num_candidates, low, high, mass * top_p.to(tl.float64), shift, CANDIDATES)
    threshold = _value_of(tl.where(seeks_k | seeks_p, nucleus.to(tl.int32), largest))
    _drop_below(row_ptr, num_tokens, threshold, BLOCK)


@triton.jit
def _list_candidates(row_ptr, candidates_ptr, num_tokens, bound, shift, BLOCK: tl.constexpr):
    """List the orders of at least `bound`. Returns their number and the mass of all tokens.

    The mass of a token is exp(logit - shift), its probability up to a factor.
    """
    lane = tl.arange(0, BLOCK)
    num_candidates = tl.zeros((), tl.int32)
    masses = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        mask = first + lane < num_tokens
        logit = tl.load(row_ptr + first + lane, mask=mask, other=float("-inf"))
        order = _order_of(logit)
        is_candidate = mask & (order >= bound)
        place = num_candidates + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
        tl.store(candidates_ptr + place, order, mask=is_candidate)
        num_candidates += tl.sum(is_candidate.to(tl.int32), axis=0)
        masses += tl.exp(logit - shift)
    # The other threads of the program read them.
    tl.debug_barrier()
    return num_candidates, tl.sum(masses.to(tl.float64), axis=0)


@triton.jit
def _kth_largest(candidates_ptr, num_candidates, low, high, k, BLOCK: tl.constexpr):
    """Largest order that at least k candidates reach: `low`, at least, and less than `high`; int64."""
    lane = tl.arange(0, BLOCK)
    while high - low > 1:
        step = (high - low + 3) >> 2
        pivot_1 = low + step
        pivot_2 = tl.minimum(pivot_1 + step, high)
        pivot_3 = tl.minimum(pivot_2 + step, high)
        counts_1 = tl.zeros((BLOCK,), tl.int32)
        counts_2 = tl.zeros((BLOCK,), tl.int32)
        counts_3 = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, num_candidates, BLOCK):
            order = tl.load(candidates_ptr + first + lane, mask=first + lane < num_candidates, other=_LOWEST)
            counts_1 += (order > (pivot_1 - 1).to(tl.int32)).to(tl.int32)
            counts_2 += (order > (pivot_2 - 1).to(tl.int32)).to(tl.int32)
            counts_3 += (order > (pivot_3 - 1).to(tl.int32)).to(tl.int32)
        reaches_1 = tl.sum(counts_1, axis=0) >= k
        reaches_2 = tl.sum(counts_2, axis=0) >= k
        reaches_3 = tl.sum(counts_3, axis=0) >= k
        low, high = _narrowed(low, high, pivot_1, pivot_2, pivot_3, reaches_1, reaches_2, reaches_3)
    return low


@triton.jit
def _mass_from(candidates_ptr, num_candidates, least, shift, BLOCK: tl.constexpr):
    """Mass of the candidates from order `least` on, float64."""
    lane = tl.arange(0, BLOCK)
    masses = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_candidates, BLOCK):
        order = tl.load(candidates_ptr + first + lane, mask=first + lane < num_candidates, other=_LOWEST)
        masses += tl.where(order > (least - 1).to(tl.int32), tl.exp(_value_of(order) - shift), 0.0)
    return tl.sum(masses.to(tl.float64), axis=0)


@triton.jit
def _nucleus(candidates_ptr, num_candidates, low, high, mass, shift, BLOCK: tl.constexpr):
    """Largest order from which on the candidates have at least `mass`: `low`, at least, and less than `high`; int64."""
    lane = tl.arange(0, BLOCK)
    while high - low > 1:
        step = (high - low + 3) >> 2
        pivot_1 = low + step
        pivot_2 = tl.minimum(pivot_1 + step, high)
        pivot_3 = tl.minimum(pivot_2 + step, high)
        masses_1 = tl.zeros((BLOCK,), tl.float32)
        masses_2 = tl.zeros((BLOCK,), tl.float32)
        masses_3 = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, num_candidates, BLOCK):
            order = tl.load(candidates_ptr + first + lane, mask=first + lane < num_candidates, other=_LOWEST)
            of_token = tl.exp(_value_of(order) - shift)
            masses_1 += tl.where(order > (pivot_1 - 1).to(tl.int32), of_token, 0.0)
            masses_2 += tl.where(order > (pivot_2 - 1).to(tl.int32), of_token, 0.0)
            masses_3 += tl.where(order > (pivot_3 - 1).to(tl.int32), of_token, 0.0)
        reaches_1 = tl.sum(masses_1.to(tl.float64), axis=0) >= mass
        reaches_2 = tl.sum(masses_2.to(tl.float64), axis=0) >= mass
        reaches_3 = tl.sum(masses_3.to(tl.float64), axis=0) >= mass
        low, high = _narrowed(low, high, pivot_1, pivot_2, pivot_3, reaches_1, reaches_2, reaches_3)
    return low


@triton.jit
def _narrowed(low, high, pivot_1, pivot_2, pivot_3, reaches_1, reaches_2, reaches_3):
    """The quarter that has the last pivot which reaches the target as its lower end."""
    new_low = tl.where(reaches_1, tl.where(reaches_2, tl.where(reaches_3, pivot_3, pivot_2), pivot_1), low)
    new_high = tl.where(reaches_1, tl.where(reaches_2, tl.where(reaches_3, high, pivot_3), pivot_2), pivot_1)
    return new_low, new_high
