"""Argmax, draws and log-probabilities in Triton.

Suffixes: R logits rows, V vocabulary, P parts of it, S slots, N log-probabilities returned per row.

Argmax and draws take two kernels: one program per row and part of the vocabulary, then one per row that merges the
parts, so that a single row occupies the whole GPU. Values are compared as integers of the same order, which places NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_PARTS = 256
# Programs that fill a large GPU.
_NUM_PROGRAMS = 1024
_TOKENS_AT_ONCE = 2048
_COUNTERS_AT_ONCE = 256
_WORDS = 4

# Orders (`_order_of`): below all, of NaN, of infinity, and of minus infinity.
_LOWEST = tl.constexpr(-(1 << 63))
_NAN = tl.constexpr((1 << 63) - 1)
_INFINITY = tl.constexpr(0x7FF0000000000000)
_MINUS_INFINITY = tl.constexpr(-0x7FF0000000000001)
_NO_TOKEN = tl.constexpr((1 << 31) - 1)


def takes(logits_RV: Tensor) -> bool:
    """Whether the kernels support these logits."""
    return logits_RV.dtype in _DTYPES and logits_RV.dim() == 2 and logits_RV.stride(1) == 1


def argmax(logits_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Argmax of each row, the first of ties, int64; whether the maximum is not finite, bool; the maximum, float32: [R].

    NaN counts as largest.
    """
    num_rows, size = logits_RV.shape
    num_parts, blocks_per_part = _split(num_rows, size, _TOKENS_AT_ONCE)
    orders_RP, tokens_RP = _room_for_parts(logits_RV, num_parts)
    _argmax_of_part[(num_rows, num_parts)](
        logits_RV,
        orders_RP,
        tokens_RP,
        logits_RV.stride(0),
        size,
        blocks_per_part,
        BLOCK=_TOKENS_AT_ONCE,
        num_warps=4,
    )
    return _merge(orders_RP, tokens_RP)


def draw(logits_RV: Tensor, seed_S: Tensor, slots_R: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
    """`kernels.sampling.draw_tokens` with `kernels.random`: int64 [R], and failures, bool [R].

    seed_S, slots_R, positions_R: int64, contiguous.
    """
    num_rows, size = logits_RV.shape
    num_parts, blocks_per_part = _split(num_rows, size, _COUNTERS_AT_ONCE * _WORDS)
    orders_RP, tokens_RP = _room_for_parts(logits_RV, num_parts)
    _draw_from_part[(num_rows, num_parts)](
        logits_RV,
        seed_S,
        slots_R,
        positions_R,
        orders_RP,
        tokens_RP,
        logits_RV.stride(0),
        size,
        blocks_per_part,
        COUNTERS=_COUNTERS_AT_ONCE,
        num_warps=4,
    )
    return _merge(orders_RP, tokens_RP)[:2]


def top_logprobs(
    logits_RV: Tensor, sampled_R: Tensor, num_logprobs: int, *, normalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.sampling.top_logprobs`. sampled_R: int64, contiguous.

    One program per row: the order of the sum must not depend on the number of rows.
    """
    num_rows, size = logits_RV.shape
    top = logits_RV.topk(num_logprobs, dim=-1)
    token_ids_RN = torch.empty((num_rows, 1 + num_logprobs), dtype=torch.int64, device=logits_RV.device)
    logprobs_RN = torch.empty((num_rows, 1 + num_logprobs), dtype=torch.float32, device=logits_RV.device)
    ranks_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    _top_logprobs[(num_rows,)](
        logits_RV,
        sampled_R,
        top.values,
        top.indices,
        token_ids_RN,
        logprobs_RN,
        ranks_R,
        logits_RV.stride(0),
        size,
        num_logprobs,
        NORMALIZES=normalize,
        BLOCK=2 * _TOKENS_AT_ONCE,
        num_warps=8,
    )
    return token_ids_RN, logprobs_RN, ranks_R


def failure_codes(has_failed_R: Tensor, raw_logits_RV: Tensor, spoilt_by_R: Tensor | None) -> Tensor:
    """`kernels.sampling.failure_codes`; all are contiguous. Rows that have not failed are not read."""
    num_rows, size = raw_logits_RV.shape
    codes_R = torch.empty(num_rows, dtype=torch.int64, device=raw_logits_RV.device)
    _failure_codes[(num_rows,)](
        has_failed_R.view(torch.uint8),
        raw_logits_RV,
        codes_R if spoilt_by_R is None else spoilt_by_R,
        codes_R,
        raw_logits_RV.stride(0),
        size,
        IS_SPOILT=spoilt_by_R is not None,
        BLOCK=_TOKENS_AT_ONCE,
        num_warps=4,
    )
    return codes_R


def _split(num_rows: int, size: int, block: int) -> tuple[int, int]:
    """Number of parts of a row, and blocks of each."""
    num_blocks = triton.cdiv(size, block)
    blocks_per_part = triton.cdiv(num_blocks, min(num_blocks, _MAX_PARTS, max(1, _NUM_PROGRAMS // max(1, num_rows))))
    return triton.cdiv(num_blocks, blocks_per_part), blocks_per_part


def _room_for_parts(logits_RV: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    shape = len(logits_RV), num_parts
    return logits_RV.new_empty(shape, dtype=torch.int64), logits_RV.new_empty(shape, dtype=torch.int32)


def _merge(orders_RP: Tensor, tokens_RP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_parts = orders_RP.shape
    token_ids_R = orders_RP.new_empty(num_rows)
    has_failed_R = orders_RP.new_empty(num_rows, dtype=torch.bool)
    largest_R = orders_RP.new_empty(num_rows, dtype=torch.float32)
    _merge_parts[(num_rows,)](
        orders_RP,
        tokens_RP,
        token_ids_R,
        has_failed_R.view(torch.uint8),
        largest_R,
        num_parts,
        MAX_PARTS=_MAX_PARTS,
        num_warps=1,
    )
    return token_ids_R, has_failed_R, largest_R


@triton.jit
def _order_of(value):
    """int64 with the order of float64 values; both zeros are equal, and NaN is largest."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int64, bitcast=True)
    order = bits ^ ((bits >> 63) & _NAN)
    return tl.where(value != value, _NAN, order)


@triton.jit
def _larger(order, token, best, best_token):
    """The larger of a lane's two; the best so far, which has the smaller token, of equals."""
    wins = order > best
    return tl.where(wins, order, best), tl.where(wins, token, best_token)


@triton.jit
def _first_largest(order, token):
    """Largest order, and the smallest token that has it."""
    largest = tl.max(order, axis=0)
    return largest, tl.min(tl.where(order == largest, token, _NO_TOKEN), axis=0)


@triton.jit(do_not_specialize=["blocks_per_part"])
def _argmax_of_part(logits_ptr, orders_ptr, tokens_ptr, row_stride, size, blocks_per_part, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), _LOWEST, tl.int64)
    best_token = tl.full((BLOCK,), _NO_TOKEN, tl.int32)
    for block in range(blocks_per_part):
        token = (part * blocks_per_part + block) * BLOCK + lane
        mask = token < size
        logit = tl.load(logits_ptr + row * row_stride + token, mask=mask, other=0.0)
        order = tl.where(mask, _order_of(logit.to(tl.float64)), _LOWEST)
        best, best_token = _larger(order, token, best, best_token)
    largest, token_id = _first_largest(best, best_token)
    tl.store(orders_ptr + row * tl.num_programs(1) + part, largest)
    tl.store(tokens_ptr + row * tl.num_programs(1) + part, token_id)


@triton.jit(do_not_specialize=["blocks_per_part"])
def _draw_from_part(
    logits_ptr,
    seeds_ptr,
    slots_ptr,
    positions_ptr,
    orders_ptr,
    tokens_ptr,
    row_stride,
    size,
    blocks_per_part,
    COUNTERS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row_ptr = logits_ptr + row * row_stride
    seed = tl.load(seeds_ptr + tl.load(slots_ptr + row))
    position = tl.load(positions_ptr + row)
    lane = tl.arange(0, COUNTERS)
    best = tl.full((COUNTERS,), _LOWEST, tl.int64)
    best_token = tl.full((COUNTERS,), _NO_TOKEN, tl.int32)
    for block in range(blocks_per_part):
        counter = (part * blocks_per_part + block) * COUNTERS + lane
        bits_0, bits_1, bits_2, bits_3 = random_bits(seed, position, counter)
        token = first_token_of(counter)
        best, best_token = _larger(_noisy_order(row_ptr, token, size, bits_0), token, best, best_token)
        token += 16
        best, best_token = _larger(_noisy_order(row_ptr, token, size, bits_1), token, best, best_token)
        token += 16
        best, best_token = _larger(_noisy_order(row_ptr, token, size, bits_2), token, best, best_token)
        token += 16
        best, best_token = _larger(_noisy_order(row_ptr, token, size, bits_3), token, best, best_token)
    largest, token_id = _first_largest(best, best_token)
    tl.store(orders_ptr + row * tl.num_programs(1) + part, largest)
    tl.store(tokens_ptr + row * tl.num_programs(1) + part, token_id)


@triton.jit
def random_bits(seed, position, counter):
    """Four words per counter, those of `kernels.random.philox`. seed, position: int64; counter: int32 block."""
    zero = counter * 0
    low = zero + position.to(tl.int32)
    high = zero + (position >> 32).to(tl.int32)
    return tl.philox(seed, counter, low, high, zero, 10)


@triton.jit
def first_token_of(counter):
    """Token of a counter's first word; those of the others follow at a distance of 16 (`kernels.random`)."""
    return counter // 16 * 64 + counter % 16


@triton.jit
def _noisy_order(row_ptr, token, size, bits):
    """Order of the sums of logits and Gumbel noise (`kernels.random.gumbel_noise`), in float64."""
    mask = token < size
    logit = tl.load(row_ptr + token, mask=mask, other=0.0).to(tl.float64)
    # Exact in float64: a multiple of 2^-33.
    rest = 1.0 - (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    noise = -tl.log(-tl.log(rest))
    return tl.where(mask, _order_of(logit + noise), _LOWEST)


@triton.jit(do_not_specialize=["num_parts"])
def _merge_parts(
    orders_ptr, tokens_ptr, token_ids_ptr, has_failed_ptr, largest_ptr, num_parts, MAX_PARTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, MAX_PARTS)
    mask = part < num_parts
    order = tl.load(orders_ptr + row * num_parts + part, mask=mask, other=_LOWEST)
    token = tl.load(tokens_ptr + row * num_parts + part, mask=mask, other=_NO_TOKEN)
    largest, token_id = _first_largest(order, token)
    has_failed = (largest <= _MINUS_INFINITY) | (largest >= _INFINITY)
    bits = largest ^ ((largest >> 63) & _NAN)
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))
    tl.store(has_failed_ptr + row, has_failed.to(tl.uint8))
    tl.store(largest_ptr + row, bits.to(tl.float64, bitcast=True).to(tl.float32))


@triton.jit(do_not_specialize=["sampled_ptr", "top_logits_ptr", "top_ids_ptr", "num_logprobs"])
def _top_logprobs(
    logits_ptr,
    sampled_ptr,
    top_logits_ptr,
    top_ids_ptr,
    token_ids_ptr,
    logprobs_ptr,
    ranks_ptr,
    row_stride,
    size,
    num_logprobs,
    NORMALIZES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each lane keeps its maximum and the sum of exponentials relative to it (Milakov and Gimelshein, 2018)."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    sampled_id = tl.load(sampled_ptr + row)
    sampled = tl.load(row_ptr + sampled_id).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, size, BLOCK):
        token = first + lane
        mask = token < size
        logit = tl.load(row_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
        count += (mask & (logit >= sampled)).to(tl.int32)
        new_largest = tl.maximum(largest, logit)
        shift = _finite_or_zero(new_largest)
        total = total * tl.exp(largest - shift) + tl.exp(logit - shift)
        largest = new_largest
    shift = _finite_or_zero(tl.max(largest, axis=0))
    # The sum of a lane with an infinite maximum is relative to 0.
    scale = tl.exp(tl.where(largest == float("inf"), 0.0, largest) - shift)
    total_of_row = tl.sum(total * scale, axis=0)
    tl.store(ranks_ptr + row, tl.sum(count, axis=0).to(tl.int64))
    base = shift * 0.0
    if NORMALIZES:
        base = shift + tl.log(total_of_row)
    first_column = row * (num_logprobs + 1)
    tl.store(token_ids_ptr + first_column, sampled_id)
    tl.store(logprobs_ptr + first_column, sampled - base)
    for first in range(0, num_logprobs, BLOCK):
        number = first + lane
        mask = number < num_logprobs
        top_id = tl.load(top_ids_ptr + row * num_logprobs + number, mask=mask, other=0)
        top_logit = tl.load(top_logits_ptr + row * num_logprobs + number, mask=mask, other=0.0).to(tl.float32)
        tl.store(token_ids_ptr + first_column + 1 + number, top_id, mask=mask)
        tl.store(logprobs_ptr + first_column + 1 + number, top_logit - base, mask=mask)


@triton.jit
def _finite_or_zero(value):
    return tl.where(tl.abs(value) < float("inf"), value, 0.0)


@triton.jit
def _failure_codes(
    has_failed_ptr,
    raw_ptr,
    spoilt_by_ptr,
    codes_ptr,
    row_stride,
    size,
    IS_SPOILT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = raw_ptr + row * row_stride
    has_failed = tl.load(has_failed_ptr + row) != 0
    lane = tl.arange(0, BLOCK)
    has_token = tl.zeros((BLOCK,), tl.int32)
    is_wrong = tl.zeros((BLOCK,), tl.int32)
    num_tokens = tl.where(has_failed, size, 0)
    for first in range(0, num_tokens, BLOCK):
        token = first + lane
        logit = tl.load(row_ptr + token, mask=token < num_tokens, other=float("-inf")).to(tl.float32)
        is_wrong |= ((logit != logit) | (logit == float("inf"))).to(tl.int32)
        has_token |= (logit > float("-inf")).to(tl.int32)
    can_be_drawn = (tl.max(has_token, axis=0) > 0) & (tl.max(is_wrong, axis=0) == 0)
    code = tl.where(can_be_drawn, 2, 1).to(tl.int64)
    if IS_SPOILT:
        code += tl.where(can_be_drawn, tl.load(spoilt_by_ptr + row), 0)
    tl.store(codes_ptr + row, tl.where(has_failed, code, 0))
