"""Grouped products of experts in Triton: gate and up projections with the activation, down projections, weighted sums.

Pairs of tokens and experts are sorted by expert, and tiles of rows belong to one expert each, whose weights are found
through a table of addresses. The grid follows from the shapes, and nothing depends on values on the host, so that
launches can be recorded. A row's sums have one order, whatever the other rows.

Suffixes: T tokens, K experts of a token, N pairs of tokens and experts, D hidden size, I intermediate size, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.experts import ExpertWeights
from penstock.kernels.triton.activation import gated

_SUM_BLOCK = 1024
# Rows of a tile where no tiling may depend on the number of tokens.
_INVARIANT_ROWS = 64


class ExpertTable:
    """Addresses of all experts' weights, int64 [E] each, with the sizes that they share. Keeps the weights."""

    def __init__(self, experts: ExpertWeights) -> None:
        self._experts = experts
        self.num_experts = len(experts.gate_up)
        gate_up, down = experts.gate_up[0], experts.down[0]
        self.hidden_size, self.intermediate_size = down.shape
        self.dtype = gate_up.dtype
        for weight in (*experts.gate_up, *experts.down):
            assert weight.is_contiguous(), "grouped products read contiguous weights"
        self.gate_up, self.down = _addresses(experts.gate_up), _addresses(experts.down)
        self.has_bias = experts.gate_up_bias is not None
        self.gate_up_bias = self.down_bias = self.gate_up
        if experts.gate_up_bias is not None and experts.down_bias is not None:
            self.gate_up_bias, self.down_bias = _addresses(experts.gate_up_bias), _addresses(experts.down_bias)


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors[0].device)


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Pairs in the order of their experts, and the tiles of `rows` pairs of each expert.

    order_N: int64, pair (token * K + place) of each row. starts_E1: int32 [E + 1], first row of each expert.
    tiles_E1: int32 [E + 1], first tile of each expert. num_tiles: upper bound from the shapes.
    """

    order_N: Tensor
    starts_E1: Tensor
    tiles_E1: Tensor
    rows: int
    num_tiles: int

    @classmethod
    def of(cls, experts_TK: Tensor, num_experts: int, rows: int) -> ExpertTiles:
        experts_N, order_N = torch.sort(experts_TK.flatten(), stable=True)
        numbers_E1 = torch.arange(num_experts + 1, device=experts_TK.device)
        starts_E1 = torch.searchsorted(experts_N, numbers_E1, out_int32=True)
        counts_E1 = starts_E1.diff(prepend=starts_E1[:1])  # of the expert before
        tiles_E1 = ((counts_E1 + rows - 1) // rows).cumsum(0).int()
        num_pairs = experts_TK.numel()
        num_tiles = min(num_pairs, num_pairs // rows + min(num_experts, num_pairs))
        return cls(order_N, starts_E1, tiles_E1, rows, num_tiles)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows, output and input features of a tile, and the launch parameters of its program."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def choose_tiling(num_pairs: int, num_experts: int, dtype: torch.dtype, *, is_invariant: bool = False) -> Tiling:
    """Tiling for so many pairs, within 99 KiB of shared memory: tiles of rows that an average expert fills."""
    rows = _INVARIANT_ROWS
    if not is_invariant:
        rows = min(max(16, int(triton.next_power_of_2(max(1, num_pairs // num_experts)))), 128)
    if dtype is torch.float32:  # without tensor cores: operands take registers
        return Tiling(min(rows, 32), 32, 32, num_warps=4, num_stages=2)
    if rows == 128:
        return Tiling(128, 64, 64, num_warps=8, num_stages=2)
    return Tiling(rows, 64, 64, num_warps=4, num_stages=3)


def mixture(
    hidden_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
    table: ExpertTable,
    activation: tuple[str, float, float],
    *,
    is_invariant: bool = False,
) -> Tensor:
    """Weighted sum of each token's experts: [T, D]. weights_TK: float32.

    activation: "silu", "gelu", "gelu_tanh" or "clamped_swiglu", whose alpha and limit follow.
    is_invariant: one tiling for any number of tokens.
    """
    num_tokens, top_k = experts_TK.shape
    num_pairs, hidden_size, size = num_tokens * top_k, table.hidden_size, table.intermediate_size
    sum_TD = torch.empty_like(hidden_TD)
    tiling = choose_tiling(num_pairs, table.num_experts, hidden_TD.dtype, is_invariant=is_invariant)
    active_NI = hidden_TD.new_empty(num_pairs, size)
    made_ND = hidden_TD.new_empty(num_pairs, hidden_size)
    if num_pairs == 0:
        return sum_TD
    tiles = ExpertTiles.of(experts_TK, table.num_experts, tiling.rows)
    name, alpha, limit = activation
    shared = {
        "ROWS": tiling.rows,
        "OUTPUTS": tiling.outputs,
        "INPUTS": tiling.inputs,
        "HAS_BIAS": table.has_bias,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
    layout = tiles.order_N, tiles.starts_E1, tiles.tiles_E1
    _gate_up_kernel[(triton.cdiv(size, tiling.outputs), tiles.num_tiles)](
        hidden_TD,
        hidden_TD.stride(0),
        table.gate_up,
        table.gate_up_bias,
        active_NI,
        *layout,
        table.num_experts,
        top_k,
        hidden_size,
        size,
        alpha,
        limit,
        ACTIVATION=name,
        **shared,
    )
    _down_kernel[(triton.cdiv(hidden_size, tiling.outputs), tiles.num_tiles)](
        active_NI,
        table.down,
        table.down_bias,
        made_ND,
        *layout,
        table.num_experts,
        size,
        hidden_size,
        **shared,
    )
    _sum_kernel[(num_tokens, triton.cdiv(hidden_size, _SUM_BLOCK))](
        made_ND,
        weights_TK,
        sum_TD,
        hidden_size,
        top_k,
        BLOCK=_SUM_BLOCK,
        num_warps=4,
        enable_fp_fusion=not is_invariant,
    )
    return sum_TD


@triton.jit
def _expert_of_tile(tiles, tile, num_experts):
    """The last expert whose first tile is not beyond this one; `num_experts` beyond the last tile."""
    low = tile * 0
    high = tile * 0 + num_experts
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(tiles + middle) <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _weight_of(addresses, expert, LIKE: tl.constexpr):
    """Pointer to an expert's weight, whose allocation is aligned to 16 bytes."""
    address = tl.load(addresses + expert)
    return tl.multiple_of(address.to(tl.pointer_type(LIKE)), 16)


@triton.jit(do_not_specialize=["num_experts", "top_k"])
def _gate_up_kernel(
    hidden,
    hidden_stride,
    weights,
    biases,
    active,
    order,
    starts,
    tiles,
    num_experts,
    top_k,
    num_inputs,
    num_outputs,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One tile of an expert's rows: activation(gate) * up of some intermediate features, in the order of rows."""
    tile = tl.program_id(1)
    expert = _expert_of_tile(tiles, tile, num_experts)
    if expert >= num_experts:
        return
    begin = tl.load(starts + expert)
    row = begin + (tile - tl.load(tiles + expert)) * ROWS + tl.arange(0, ROWS)
    is_row = row < tl.load(starts + expert + 1)
    token = tl.load(order + row, mask=is_row, other=0) // top_k
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < num_outputs
    column = tl.arange(0, INPUTS)
    hidden_row = hidden + token[:, None] * hidden_stride
    weight = _weight_of(weights, expert, hidden.dtype.element_ty)
    gate_row = weight + output.to(tl.int64)[None, :] * num_inputs
    up_row = gate_row + num_outputs.to(tl.int64) * num_inputs
    gate = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        place = start + column
        is_input = place < num_inputs
        is_weight = is_input[:, None] & is_output[None, :]
        rows = tl.load(hidden_row + place[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        gates = tl.load(gate_row + place[:, None], mask=is_weight, other=0.0)
        ups = tl.load(up_row + place[:, None], mask=is_weight, other=0.0)
        gate = tl.dot(rows, gates, gate, input_precision="ieee")
        up = tl.dot(rows, ups, up, input_precision="ieee")
    if HAS_BIAS:
        bias = _weight_of(biases, expert, hidden.dtype.element_ty)
        gate += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + num_outputs + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    dtype = active.dtype.element_ty
    result = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), alpha, limit, dtype, ACTIVATION)
    place = active + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(place, result.to(dtype), mask=is_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_experts"])
def _down_kernel(
    active,
    weights,
    biases,
    made,
    order,
    starts,
    tiles,
    num_experts,
    num_inputs,
    num_outputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One tile of an expert's rows: some output features, at the places of their pairs."""
    tile = tl.program_id(1)
    expert = _expert_of_tile(tiles, tile, num_experts)
    if expert >= num_experts:
        return
    begin = tl.load(starts + expert)
    row = begin + (tile - tl.load(tiles + expert)) * ROWS + tl.arange(0, ROWS)
    is_row = row < tl.load(starts + expert + 1)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < num_outputs
    column = tl.arange(0, INPUTS)
    active_row = active + row.to(tl.int64)[:, None] * num_inputs
    weight_row = _weight_of(weights, expert, active.dtype.element_ty) + output.to(tl.int64)[None, :] * num_inputs
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        place = start + column
        is_input = place < num_inputs
        rows = tl.load(active_row + place[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        downs = tl.load(weight_row + place[:, None], mask=is_input[:, None] & is_output[None, :], other=0.0)
        total = tl.dot(rows, downs, total, input_precision="ieee")
    if HAS_BIAS:
        bias = _weight_of(biases, expert, active.dtype.element_ty)
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(order + row, mask=is_row, other=0)
    place = made + pair[:, None] * num_outputs + output[None, :]
    tl.store(place, total.to(made.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["top_k"])
def _sum_kernel(made, weights, result, size, top_k, BLOCK: tl.constexpr):
    """Weighted sum of a token's pairs, one after the other, of a block of columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for index in range(top_k):
        pair = token * top_k + index
        weight = tl.load(weights + pair).to(tl.float32)
        total += weight * tl.load(made + pair * size + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(result + token * size + column, total.to(result.dtype.element_ty), mask=mask)
