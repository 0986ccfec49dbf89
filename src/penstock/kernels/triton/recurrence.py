"""Causal convolution, linear recurrences and gated norms of recurrent layers in Triton.

A program takes the value channels of a head, or some channels of a convolution, through a request's tokens one after
another, and keeps the state in registers: the state at a position has one value, by decode, verification, chunks or
from a snapshot. A chunked scan of long prompts, by matrix products over the tokens of a chunk, would need chunks that
end at fixed positions, with their states in float32 between steps, so that a state does not depend on where steps end.
Suffixes are those of `kernels.recurrence`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.recurrence_rule import (
    ACTIVATIONS,
    STEP_ACTIVATIONS,
    STEP_SIZES,
    ConvolutionRule,
    GateRule,
    ScanParameters,
    ScanRule,
)
from penstock.kernels.recurrent_state import StateStep

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements of a state that a program keeps, and channels of a convolution or norm.
_STATE_TILE, _CHANNELS = 4096, 128


def takes(rows: Sequence[Tensor], parameters: Sequence[Tensor | None]) -> bool:
    """Whether the kernels support these tensors: rows [T, width] with contiguous columns, contiguous parameters."""
    return all(x.dtype in _DTYPES and x.dim() == 2 and x.stride(1) == 1 for x in rows) and all(
        one is None or (one.dtype in _DTYPES and one.is_contiguous()) for one in parameters
    )


def convolve(
    x_TW: Tensor,
    inputs_BKC: Tensor,
    step: StateStep,
    weight_KC: Tensor,
    bias_C: Tensor | None,
    rule: ConvolutionRule,
) -> Tensor:
    """`kernels.recurrence.convolve`."""
    num_taps, channels = weight_KC.shape
    out_TC = torch.empty(x_TW.shape[0], channels, dtype=x_TW.dtype, device=x_TW.device)
    num_requests = step.seq_lens_R.shape[0]
    before, after = rule.gates or (-1, -1)
    _convolve[(num_requests, triton.cdiv(channels, _CHANNELS))](
        x_TW,
        x_TW.stride(0),
        out_TC,
        inputs_BKC,
        inputs_BKC.stride(0),
        weight_KC,
        weight_KC if bias_C is None else bias_C,
        step.block_table_RB,
        step.block_table_RB.stride(0),
        step.query_start_loc,
        step.seq_lens_R,
        step.slot_mapping_T,
        OFFSET=rule.offset,
        GATE_BEFORE=before,
        GATE_AFTER=after,
        CHANNELS=channels,
        TAPS=num_taps,
        ROWS=triton.next_power_of_2(num_taps),
        ACTIVATION=ACTIVATIONS[rule.activation],
        HAS_BIAS=bias_C is not None,
        NUM_OWN=step.num_own_blocks,
        BLOCK_SIZE=step.block_size,
        COLUMNS=_CHANNELS,
        num_warps=2,
    )
    return out_TC


def scan(
    mixed_TC: Tensor,
    gates_TW: Tensor,
    states_BHNP: Tensor,
    step: StateStep,
    rule: ScanRule,
    parameters: ScanParameters,
) -> Tensor:
    """`kernels.recurrence.scan`."""
    _, num_heads, key_size, value_size = states_BHNP.shape
    decay_log, step_bias, skip = parameters
    out_TX = torch.empty(mixed_TC.shape[0], num_heads * value_size, dtype=mixed_TC.dtype, device=mixed_TC.device)
    keys = triton.next_power_of_2(key_size)
    values = min(triton.next_power_of_2(value_size), max(1, _STATE_TILE // keys))
    _scan[(step.seq_lens_R.shape[0], num_heads, triton.cdiv(value_size, values))](
        mixed_TC,
        mixed_TC.stride(0),
        gates_TW,
        gates_TW.stride(0),
        out_TX,
        states_BHNP,
        states_BHNP.stride(0),
        decay_log,
        decay_log if step_bias is None else step_bias,
        decay_log if skip is None else skip,
        step.block_table_RB,
        step.block_table_RB.stride(0),
        step.query_start_loc,
        step.seq_lens_R,
        step.slot_mapping_T,
        rule.step_scale,
        rule.min_step,
        rule.max_step,
        rule.beta_scale,
        rule.query_scale,
        HEADS=num_heads,
        HEADS_PER_GROUP=num_heads // rule.num_groups,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        VALUES_AT=rule.values,
        KEYS_AT=-1 if rule.keys is None else rule.keys,
        QUERIES_AT=-1 if rule.queries is None else rule.queries,
        STEPS_AT=-1 if rule.steps is None else rule.steps,
        BETAS_AT=-1 if rule.betas is None else rule.betas,
        STEP_SIZE=STEP_SIZES[rule.step_size],
        STEP_ACTIVATION=STEP_ACTIVATIONS[rule.step_activation],
        SCALES_VALUES=rule.scales_values,
        KEEPS_VARIANCE=rule.keeps_variance,
        HAS_UNIT_KEYS=rule.has_unit_keys,
        DECAYS_BY_ELEMENT=decay_log.dim() == 3,
        HAS_BIAS=step_bias is not None,
        HAS_SKIP=skip is not None,
        SKIPS_BY_VALUE=skip is not None and skip.numel() > num_heads,
        NUM_OWN=step.num_own_blocks,
        BLOCK_SIZE=step.block_size,
        KEYS=keys,
        VALUES=values,
        num_warps=4,
    )
    return out_TX


def gated_norm(
    y_TX: Tensor,
    gate_TW: Tensor,
    weight: Tensor | None,
    eps: float,
    rule: GateRule,
) -> Tensor:
    """`kernels.recurrence.gated_norm`."""
    num_tokens, width = y_TX.shape
    out_TX = torch.empty(num_tokens, width, dtype=y_TX.dtype, device=y_TX.device)
    size = width if weight is None else rule.group_size
    _gated_norm[(num_tokens, width // size)](
        y_TX,
        y_TX.stride(0),
        gate_TW,
        gate_TW.stride(0),
        y_TX if weight is None else weight,
        0 if weight is None or weight.shape[0] == size else size,
        out_TX,
        eps,
        rule.scale,
        WIDTH=width,
        OFFSET=rule.offset,
        SIZE=size,
        GATES_FIRST=rule.gates_first or weight is None,
        NORMALISES=weight is not None,
        ACTIVATION=ACTIVATIONS[rule.activation],
        BLOCK=triton.next_power_of_2(size),
        num_warps=4 if size <= 2048 else 8,
    )
    return out_TX


@triton.jit
def _softplus(x):
    positive = tl.maximum(x, 0.0)
    e = tl.exp(-tl.abs(x))
    # log(1 + e) for small e, where 1 + e is rounded: e * log(1 + e) / ((1 + e) - 1).
    sum_of = 1.0 + e
    return positive + tl.where(sum_of == 1.0, e, e * (tl.log(sum_of) / tl.where(sum_of == 1.0, 1.0, sum_of - 1.0)))


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        return x
    factor = 1.0 / (1.0 + tl.exp(-x))
    return x * factor if ACTIVATION == 1 else factor


@triton.jit
def _before(table_ptr, first, NUM_OWN: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Page of the state before position `first`, 0 for none."""
    is_border = (first > 0) & (first % BLOCK_SIZE == 0)
    snapshot = tl.load(table_ptr + NUM_OWN + first // BLOCK_SIZE - 1, mask=is_border, other=0)
    own = tl.load(table_ptr + (first - 1) % NUM_OWN, mask=first > 0, other=0)
    return tl.where(snapshot > 0, snapshot, own).to(tl.int64)


@triton.jit
def _kept(table_ptr, position, length, is_token, NUM_OWN: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Pages of the state after a position: a request's own, and a snapshot; 0 for none."""
    is_own = is_token & (position >= length - NUM_OWN)
    own = tl.load(table_ptr + position % NUM_OWN, mask=is_own, other=0)
    is_border = is_token & ((position + 1) % BLOCK_SIZE == 0)
    snapshot = tl.load(table_ptr + NUM_OWN + position // BLOCK_SIZE, mask=is_border, other=0)
    return own.to(tl.int64), snapshot.to(tl.int64)


@triton.jit
def _convolve(
    x_ptr,
    x_stride,
    out_ptr,
    inputs_ptr,
    page_stride,
    weight_ptr,
    bias_ptr,
    tables_ptr,
    table_stride,
    starts_ptr,
    lengths_ptr,
    slots_ptr,
    OFFSET: tl.constexpr,
    GATE_BEFORE: tl.constexpr,
    GATE_AFTER: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_OWN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some channels of a request."""
    request = tl.program_id(0).to(tl.int64)
    table_ptr = tables_ptr + request * table_stride
    start, end = tl.load(starts_ptr + request).to(tl.int64), tl.load(starts_ptr + request + 1).to(tl.int64)
    length = tl.load(lengths_ptr + request)
    first = length - (end - start)
    channel_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask_C = channel_C < CHANNELS
    bias_C = tl.zeros([COLUMNS], tl.float32)
    if HAS_BIAS:
        bias_C = tl.load(bias_ptr + channel_C, mask=mask_C, other=0.0).to(tl.float32)
    row_K1 = tl.arange(0, ROWS)[:, None]
    page = _before(table_ptr, first, NUM_OWN, BLOCK_SIZE)
    mask_KC = (row_K1 < TAPS - 1) & mask_C[None, :] & (page > 0)
    before_KC_ptr = inputs_ptr + page * page_stride + row_K1 * CHANNELS + channel_C[None, :]
    before_KC = tl.load(before_KC_ptr, mask=mask_KC, other=0.0).to(tl.float32)

    for token in range(start, end):
        is_token = tl.load(slots_ptr + token) >= 0
        own, snapshot = _kept(table_ptr, first + token - start, length, is_token, NUM_OWN, BLOCK_SIZE)
        sum_C = bias_C
        for tap in tl.static_range(TAPS):
            source = token - (TAPS - 1) + tap
            is_here = source >= start
            x_C_ptr = x_ptr + source * x_stride + channel_C
            input_C = tl.load(x_C_ptr + OFFSET, mask=mask_C & is_here, other=0.0).to(tl.float32)
            if GATE_BEFORE >= 0:
                input_C *= tl.load(x_C_ptr + GATE_BEFORE, mask=mask_C & is_here, other=0.0).to(tl.float32)
            input_C = input_C.to(inputs_ptr.dtype.element_ty).to(tl.float32)
            is_row_K1 = row_K1 == TAPS - 1 - (start - source)
            input_C = tl.where(is_here, input_C, tl.sum(tl.where(is_row_K1, before_KC, 0.0), axis=0))
            sum_C += input_C * tl.load(weight_ptr + tap * CHANNELS + channel_C, mask=mask_C, other=0.0).to(tl.float32)
            if tap > 0:
                kept_C_ptr = inputs_ptr + (tap - 1) * CHANNELS + channel_C
                kept_C = input_C.to(inputs_ptr.dtype.element_ty)
                tl.store(kept_C_ptr + own * page_stride, kept_C, mask=mask_C & (own > 0))
                tl.store(kept_C_ptr + snapshot * page_stride, kept_C, mask=mask_C & (snapshot > 0))
        out_C = _activate(sum_C, ACTIVATION)
        if GATE_AFTER >= 0:
            gate_C_ptr = x_ptr + token * x_stride + GATE_AFTER + channel_C
            out_C *= tl.load(gate_C_ptr, mask=mask_C, other=0.0).to(tl.float32)
        out_C = tl.where(is_token, out_C, 0.0)
        out_C_ptr = out_ptr + token * CHANNELS + channel_C
        tl.store(out_C_ptr, out_C.to(out_ptr.dtype.element_ty), mask=mask_C)


@triton.jit
def _scan(
    mixed_ptr,
    mixed_stride,
    gates_ptr,
    gates_stride,
    out_ptr,
    states_ptr,
    page_stride,
    decay_log_ptr,
    bias_ptr,
    skip_ptr,
    tables_ptr,
    table_stride,
    starts_ptr,
    lengths_ptr,
    slots_ptr,
    step_scale,
    min_step,
    max_step,
    beta_scale,
    query_scale,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUES_AT: tl.constexpr,
    KEYS_AT: tl.constexpr,
    QUERIES_AT: tl.constexpr,
    STEPS_AT: tl.constexpr,
    BETAS_AT: tl.constexpr,
    STEP_SIZE: tl.constexpr,
    STEP_ACTIVATION: tl.constexpr,
    SCALES_VALUES: tl.constexpr,
    KEEPS_VARIANCE: tl.constexpr,
    HAS_UNIT_KEYS: tl.constexpr,
    DECAYS_BY_ELEMENT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    SKIPS_BY_VALUE: tl.constexpr,
    NUM_OWN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Some value channels of a head of a request."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table_ptr = tables_ptr + request * table_stride
    start, end = tl.load(starts_ptr + request).to(tl.int64), tl.load(starts_ptr + request + 1).to(tl.int64)
    length = tl.load(lengths_ptr + request)
    first = length - (end - start)
    key_N = tl.arange(0, KEYS)
    value_P = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    mask_N, mask_P = key_N < KEY_SIZE, value_P < VALUE_SIZE
    element_NP = (head * KEY_SIZE + key_N[:, None]) * VALUE_SIZE + value_P[None, :]
    mask_NP = mask_N[:, None] & mask_P[None, :]

    if DECAYS_BY_ELEMENT:
        rate_NP = tl.exp(tl.load(decay_log_ptr + element_NP, mask=mask_NP, other=0.0).to(tl.float32))
    else:
        rate_NP = tl.exp(tl.load(decay_log_ptr + head).to(tl.float32)) + tl.zeros([1, 1], tl.float32)
    page = _before(table_ptr, first, NUM_OWN, BLOCK_SIZE)
    state_ptr = states_ptr + page * page_stride + element_NP
    state_NP = tl.load(state_ptr, mask=mask_NP & (page > 0), other=0.0).to(tl.float32)

    for token in range(start, end):
        is_token = tl.load(slots_ptr + token) >= 0
        mixed_T_ptr = mixed_ptr + token * mixed_stride
        gates_T_ptr = gates_ptr + token * gates_stride
        of_group_N = (head // HEADS_PER_GROUP) * KEY_SIZE + key_N
        key_row_N = tl.where(mask_N, 1.0, 0.0)
        query_N = key_row_N
        if KEYS_AT >= 0:
            key_row_N = tl.load(mixed_T_ptr + KEYS_AT + of_group_N, mask=mask_N, other=0.0).to(tl.float32)
        if QUERIES_AT >= 0:
            query_N = tl.load(mixed_T_ptr + QUERIES_AT + of_group_N, mask=mask_N, other=0.0).to(tl.float32)
        of_head_P = head * VALUE_SIZE + value_P
        values_P = tl.load(mixed_T_ptr + VALUES_AT + of_head_P, mask=mask_P, other=0.0).to(tl.float32)
        if HAS_UNIT_KEYS:
            key_row_N *= 1.0 / tl.sqrt(tl.sum(key_row_N * key_row_N, axis=0) + 1e-6)
            query_N *= 1.0 / tl.sqrt(tl.sum(query_N * query_N, axis=0) + 1e-6)
        query_N *= query_scale

        step_NP = tl.full([1, 1], 1.0, tl.float32)
        if STEPS_AT >= 0:
            if STEP_SIZE == 0:
                at_NP, is_there_NP = tl.zeros([1, 1], tl.int32) + head, tl.full([1, 1], 1, tl.int1)
            elif STEP_SIZE == 1:
                at_NP, is_there_NP = (head * KEY_SIZE + key_N)[:, None], mask_N[:, None]
            else:
                at_NP, is_there_NP = of_head_P[None, :], mask_P[None, :]
            step_NP = tl.load(gates_T_ptr + STEPS_AT + at_NP, mask=is_there_NP, other=0.0).to(tl.float32) * step_scale
            if HAS_BIAS:
                step_NP += tl.load(bias_ptr + at_NP, mask=is_there_NP, other=0.0).to(tl.float32)
            step_NP = _softplus(step_NP) if STEP_ACTIVATION == 0 else _activate(step_NP, 2)
            step_NP = tl.minimum(tl.maximum(step_NP, min_step), max_step)
        decay_NP = tl.exp(-rate_NP * step_NP)
        state_NP *= decay_NP
        if BETAS_AT >= 0:
            beta = _activate(tl.load(gates_T_ptr + BETAS_AT + head).to(tl.float32), 2) * beta_scale
            added_P = beta * (values_P - tl.sum(state_NP * key_row_N[:, None], axis=0))
        elif SCALES_VALUES:
            added_P = tl.sum(step_NP * values_P[None, :], axis=0)
        else:
            added_P = values_P
        added_NP = key_row_N[:, None] * added_P[None, :]
        if KEEPS_VARIANCE:
            is_first = (token == start) & (page == 0)
            added_NP *= tl.where(is_first, 1.0, tl.sqrt(1.0 - decay_NP * decay_NP))
        state_NP += added_NP
        out_P = tl.sum(state_NP * query_N[:, None], axis=0)
        if HAS_SKIP:
            if SKIPS_BY_VALUE:
                out_P += tl.load(skip_ptr + of_head_P, mask=mask_P, other=0.0).to(tl.float32) * values_P
            else:
                out_P += tl.load(skip_ptr + head).to(tl.float32) * values_P
        out_P_ptr = out_ptr + token * (HEADS * VALUE_SIZE) + of_head_P
        tl.store(out_P_ptr, tl.where(is_token, out_P, 0.0).to(out_ptr.dtype.element_ty), mask=mask_P)

        own, snapshot = _kept(table_ptr, first + token - start, length, is_token, NUM_OWN, BLOCK_SIZE)
        kept_NP = state_NP.to(states_ptr.dtype.element_ty)
        kept_ptr = states_ptr + element_NP
        tl.store(kept_ptr + own * page_stride, kept_NP, mask=mask_NP & (own > 0))
        tl.store(kept_ptr + snapshot * page_stride, kept_NP, mask=mask_NP & (snapshot > 0))
        state_NP = kept_NP.to(tl.float32)


@triton.jit
def _gated_norm(
    y_ptr,
    y_stride,
    gate_ptr,
    gate_stride,
    weight_ptr,
    weight_stride,
    out_ptr,
    eps,
    gate_scale,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    SIZE: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    NORMALISES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A group of a token."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column_X = tl.arange(0, BLOCK)
    mask_X = column_X < SIZE
    at_X = group * SIZE + column_X
    y_X = tl.load(y_ptr + token * y_stride + at_X, mask=mask_X, other=0.0).to(tl.float32)
    gate_X = tl.load(gate_ptr + token * gate_stride + OFFSET + at_X, mask=mask_X, other=0.0).to(tl.float32)
    gate_X = _activate(gate_X * gate_scale, ACTIVATION)
    if GATES_FIRST:
        y_X *= gate_X
    if NORMALISES:
        weight_X = tl.load(weight_ptr + group * weight_stride + column_X, mask=mask_X, other=0.0).to(tl.float32)
        y_X *= 1.0 / tl.sqrt(tl.sum(y_X * y_X, axis=0) / SIZE + eps) * weight_X
    if not GATES_FIRST:
        y_X *= gate_X
    tl.store(out_ptr + token * WIDTH + at_X, y_X.to(out_ptr.dtype.element_ty), mask=mask_X)
