"""Grouped products of experts in Triton: gate and up projections with the activation, down projections, weighted sums.

Pairs of tokens and experts are sorted by expert, and tiles of rows belong to one expert each, whose weights are found
through a table of addresses. The grid follows from the shapes, and nothing depends on values on the host, so that
launches can be recorded. A row's sums have one order, whatever the other rows. Weights have any of the formats of
`penstock.kernels.triton.stored_weight`, which dequantises them in registers.

Suffixes: T tokens, K experts of a token, N pairs of tokens and experts, D hidden size, I intermediate size, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.stored_weight import FLOAT8, PLAIN, ExpertWeights, StoredWeight
from penstock.kernels.triton.activation import gated
from penstock.kernels.triton.stored_weight import MANY_ROWS, Tiling, choose_tiling, product, sizes_of

_SUM_BLOCK = 1024
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class WeightTable:
    """Addresses of all experts' weights of one layout, int64 [E] each. like: their layout, without tensors of values.

    values, scales, zeros, biases: addresses; those of what the weights do not have repeat the values'.
    """

    like: StoredWeight
    values: Tensor
    scales: Tensor
    zeros: Tensor
    biases: Tensor
    has_bias: bool

    @classmethod
    def of(cls, weights: Sequence[StoredWeight], biases: Sequence[Tensor] | None) -> WeightTable:
        values = _addresses([weight.values for weight in weights])
        scales = [weight.scales_OG for weight in weights if weight.scales_OG is not None]
        zeros = [weight.zeros_OG for weight in weights if weight.zeros_OG is not None]
        return cls(
            weights[0].without_values(),
            values,
            _addresses(scales) if scales else values,
            _addresses(zeros) if zeros else values,
            _addresses(biases) if biases else values,
            bool(biases),
        )

    @property
    def num_outputs(self) -> int:
        return self.like.values.shape[0]


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    assert all(tensor.is_contiguous() for tensor in tensors), "grouped products read contiguous tensors"
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors[0].device)


class ExpertTable:
    """Tables of all experts' weights."""

    def __init__(self, experts: ExpertWeights) -> None:
        self.num_experts = len(experts.gate_up)
        self.gate_up = WeightTable.of(experts.gate_up, experts.gate_up_bias)
        self.down = WeightTable.of(experts.down, experts.down_bias)


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
    num_experts: int

    @classmethod
    def of(cls, experts_TK: Tensor, num_experts: int, rows: int) -> ExpertTiles:
        experts_N, order_N = torch.sort(experts_TK.flatten(), stable=True)
        numbers_E1 = torch.arange(num_experts + 1, device=experts_TK.device)
        starts_E1 = torch.searchsorted(experts_N, numbers_E1, out_int32=True)
        counts_E1 = starts_E1.diff(prepend=starts_E1[:1])  # of the expert before
        tiles_E1 = ((counts_E1 + rows - 1) // rows).cumsum(0).int()
        num_pairs = experts_TK.numel()
        num_tiles = min(num_pairs, num_pairs // rows + min(num_experts, num_pairs))
        return cls(order_N, starts_E1, tiles_E1, rows, num_tiles, num_experts)


def choose_rows(num_pairs: int, num_experts: int, *, is_invariant: bool) -> int:
    """Rows of an average expert, for `choose_tiling`."""
    return MANY_ROWS if is_invariant else max(1, num_pairs // num_experts)


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
    hidden_size, size = table.down.num_outputs, table.down.like.num_inputs
    sum_TD = torch.empty_like(hidden_TD)
    if num_tokens == 0:
        return sum_TD
    num_rows = choose_rows(num_tokens * top_k, table.num_experts, is_invariant=is_invariant)
    active_NI = hidden_TD.new_empty(num_tokens * top_k, size)
    made_ND = hidden_TD.new_empty(num_tokens * top_k, hidden_size)
    tiles: ExpertTiles | None = None
    for weights, x, result, top in (
        (table.gate_up, hidden_TD, active_NI, activation),
        (table.down, active_NI, made_ND, ("", 0.0, 0.0)),
    ):
        tiling = choose_tiling(num_rows, hidden_TD.dtype, weights.like)
        if tiles is None or tiles.rows != tiling.rows:
            tiles = ExpertTiles.of(experts_TK, table.num_experts, tiling.rows)
        _launch(x, weights, result, tiles, tiling, top, top_k)
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


def _launch(
    x: Tensor,
    weights: WeightTable,
    result: Tensor,
    tiles: ExpertTiles,
    tiling: Tiling,
    activation: tuple[str, float, float],
    top_k: int,
) -> None:
    """Products of all experts. With an activation x is by token, and the result by row; without one by row and pair."""
    name, alpha, limit = activation
    like = weights.like
    scales = like.scales_OG
    _grouped_kernel[(triton.cdiv(weights.num_outputs, tiling.outputs), tiles.num_tiles)](
        x,
        x.stride(0),
        weights.values,
        weights.scales,
        weights.zeros,
        weights.biases,
        result,
        tiles.order_N,
        tiles.starts_E1,
        tiles.tiles_E1,
        tiles.num_experts,
        top_k,
        result.shape[1],
        *sizes_of(like),
        alpha,
        limit,
        ACTIVATION=name,
        FORM=like.form,
        VALUE=_TYPES[x.dtype] if like.form == PLAIN else tl.float8e4nv if like.form == FLOAT8 else tl.uint8,
        SCALE=tl.uint8 if scales is not None and scales.dtype is torch.uint8 else tl.float32,
        HAS_BIAS=weights.has_bias,
        **tiling.options,
    )


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
def _pointer(addresses, expert, TYPE: tl.constexpr):
    return tl.load(addresses + expert).to(tl.pointer_type(TYPE))


@triton.jit(do_not_specialize=["num_experts", "top_k"])
def _grouped_kernel(
    x,
    x_stride,
    values,
    scales,
    zeros,
    biases,
    result,
    order,
    starts,
    tiles,
    num_experts,
    top_k,
    num_results,
    num_inputs,
    row_size,
    num_groups,
    group_size,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    FORM: tl.constexpr,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALING: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Grouped product: a tile of an expert's rows and some of its output features.

    With an activation: of tokens, activation(gate) * up, in the order of rows. A tile alternates between the outputs of
    gate and up. Without: of the rows in their order, at the places of their pairs.
    """
    tile = tl.program_id(1)
    expert = _expert_of_tile(tiles, tile, num_experts)
    if expert >= num_experts:
        return
    row = tl.load(starts + expert) + (tile - tl.load(tiles + expert)) * ROWS + tl.arange(0, ROWS)
    is_row = row < tl.load(starts + expert + 1)
    pair = tl.load(order + row, mask=is_row, other=0)
    column = tl.arange(0, OUTPUTS)
    # Outputs beyond the last repeat the last, and are not stored.
    if ACTIVATION != "":
        source = pair // top_k
        output = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        of_column = tl.program_id(0) * (OUTPUTS // 2) + column // 2
        feature = tl.minimum(of_column, num_results - 1) + (column % 2) * num_results
    else:
        source = row.to(tl.int64)
        output = tl.program_id(0) * OUTPUTS + column
        feature = tl.minimum(output, num_results - 1)
    total = product(
        x + source[:, None] * x_stride,
        is_row,
        tl.multiple_of(_pointer(values, expert, VALUE), 16),  # allocations are aligned
        _pointer(scales, expert, SCALE),
        _pointer(zeros, expert, tl.uint8),
        feature,
        num_inputs,
        row_size,
        num_groups,
        group_size,
        FORM,
        SCALING,
        ROWS,
        OUTPUTS,
        INPUTS,
    )
    dtype = result.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(_pointer(biases, expert, dtype) + feature).to(tl.float32)[None, :]
    if ACTIVATION != "":
        rounded = total.to(dtype).to(tl.float32)
        gate, up = tl.split(tl.reshape(rounded, [ROWS, OUTPUTS // 2, 2]))
        total = gated(gate, up, alpha, limit, dtype, ACTIVATION)
        target = row.to(tl.int64)
    else:
        target = pair
    place = result + target[:, None] * num_results + output[None, :]
    tl.store(place, total.to(dtype), mask=is_row[:, None] & (output < num_results)[None, :])


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
