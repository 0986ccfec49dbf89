"""Low-rank products of LoRA adapters in Triton: out += scaling * B (A x), with the adapter of each row.

A program takes a block of rows, one adapter, and a part of the outputs; it ends at once where no row of its block has
that adapter. Every row's sums have one order, whatever the other rows, and nothing depends on values on the host, so
that launches can be recorded.

Suffixes: T rows (tokens), S slots, P pieces, R rank, I input features, O output features of a piece, N blocks of
outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows and outputs of a program.
_ROWS, _OUTPUTS = 16, 64
# Elements of A that a program reads at a time.
_TILE = 4096
# Operands of matrix products have at least as many columns.
_LEAST_RANK = 16


def output_blocks(pieces: Sequence[tuple[int, int]], rows_of_piece: Sequence[int], device: torch.device) -> Tensor:
    """Blocks of outputs, int32 [N, 4]: piece, first output, number of outputs up to the piece's end, and row in B.

    pieces: first output and number of outputs of each. rows_of_piece: first row of slot 0 of each piece in B.
    """
    blocks = [
        (piece, first + start, size - start, row + start)
        for piece, ((first, size), row) in enumerate(zip(pieces, rows_of_piece, strict=True))
        for start in range(0, size, _OUTPUTS)
    ]
    return torch.tensor(blocks, dtype=torch.int32, device=device)


def shrink(x_TI: Tensor, a_PSRI: Tensor, ranks_SP: Tensor, slots_T: Tensor) -> Tensor:
    """A x of each row's adapter: float32 [T, P, R]. Rows without an adapter, or without a piece, are undefined."""
    num_rows, num_inputs = x_TI.shape
    num_pieces, num_slots, rank, _ = a_PSRI.shape
    shrunk_TPR = torch.empty(num_rows, num_pieces, rank, device=x_TI.device)
    _shrink_kernel[(triton.cdiv(num_rows, _ROWS), num_slots, num_pieces)](
        x_TI,
        x_TI.stride(0),
        a_PSRI,
        ranks_SP,
        slots_T,
        shrunk_TPR,
        num_rows,
        num_inputs,
        num_slots,
        num_pieces,
        rank,
        ROWS=_ROWS,
        RANK=_padded(rank),
        INPUTS=min(_TILE // _padded(rank), 128),
        PRECISION="ieee",
    )
    return shrunk_TPR


def expand(
    out_TX: Tensor,
    shrunk_TPR: Tensor,
    b_XR: Tensor,
    rows_of_slot: Tensor,
    blocks_N4: Tensor,
    ranks_SP: Tensor,
    scaling_SP: Tensor,
    slots_T: Tensor,
    dtype: torch.dtype,
) -> None:
    """Add scaling * B (A x) to the layer's output, in place.

    rows_of_slot: int32 [P], rows of B between two slots of each piece. dtype: in which products are computed.
    """
    num_rows, num_pieces, rank = shrunk_TPR.shape
    _expand_kernel[(triton.cdiv(num_rows, _ROWS), ranks_SP.shape[0], blocks_N4.shape[0])](
        out_TX,
        out_TX.stride(0),
        shrunk_TPR,
        shrunk_TPR.stride(0),
        shrunk_TPR.stride(1),
        b_XR,
        rows_of_slot,
        blocks_N4,
        ranks_SP,
        scaling_SP,
        slots_T,
        num_rows,
        num_pieces,
        rank,
        ROWS=_ROWS,
        RANK=_padded(rank),
        OUTPUTS=_OUTPUTS,
        DTYPE={torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype],
        PRECISION="ieee",
    )


def _padded(rank: int) -> int:
    return max(_LEAST_RANK, 1 << (rank - 1).bit_length())


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x,
    x_stride,
    a,
    ranks_SP,
    slots_T,
    shrunk,
    num_rows,
    num_inputs,
    num_slots,
    num_pieces,
    rank,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.program_id(1)
    piece = tl.program_id(2)
    is_row = (row < num_rows) & (tl.load(slots_T + row, mask=row < num_rows, other=-1) == slot)
    its_rank = tl.load(ranks_SP + slot * num_pieces + piece)
    if (tl.sum(is_row.to(tl.int32)) > 0) & (its_rank > 0):
        number = tl.arange(0, RANK)
        is_number = number < its_rank
        x_row = x + row.to(tl.int64)[:, None] * x_stride
        a_row = a + ((piece * num_slots + slot).to(tl.int64) * rank + number)[None, :] * num_inputs
        sums = tl.zeros([ROWS, RANK], tl.float32)
        for start in range(0, num_inputs, INPUTS):
            place = start + tl.arange(0, INPUTS)
            is_place = place < num_inputs
            values = tl.load(x_row + place[None, :], mask=is_row[:, None] & is_place[None, :], other=0.0)
            weights = tl.load(a_row + place[:, None], mask=is_place[:, None] & is_number[None, :], other=0.0)
            sums += tl.dot(values, weights.to(values.dtype), input_precision=PRECISION)
        at = shrunk + (row.to(tl.int64)[:, None] * num_pieces + piece) * rank + number[None, :]
        tl.store(at, sums, mask=is_row[:, None] & is_number[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    out,
    out_stride,
    shrunk,
    shrunk_stride,
    piece_stride,
    b,
    rows_of_slot,
    blocks_N4,
    ranks_SP,
    scaling_SP,
    slots_T,
    num_rows,
    num_pieces,
    rank,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.program_id(1)
    block = blocks_N4 + tl.program_id(2) * 4
    piece = tl.load(block)
    is_row = (row < num_rows) & (tl.load(slots_T + row, mask=row < num_rows, other=-1) == slot)
    its_rank = tl.load(ranks_SP + slot * num_pieces + piece)
    if (tl.sum(is_row.to(tl.int32)) > 0) & (its_rank > 0):
        number = tl.arange(0, RANK)
        is_number = number < its_rank
        output = tl.arange(0, OUTPUTS)
        is_output = output < tl.load(block + 2)
        b_row = tl.load(block + 3).to(tl.int64) + slot.to(tl.int64) * tl.load(rows_of_slot + piece)
        values = tl.load(
            shrunk + row.to(tl.int64)[:, None] * shrunk_stride + piece * piece_stride + number[None, :],
            mask=is_row[:, None] & is_number[None, :],
            other=0.0,
        )
        weights = tl.load(
            b + (b_row + output)[None, :] * rank + number[:, None],
            mask=is_number[:, None] & is_output[None, :],
            other=0.0,
        )
        products = tl.dot(values.to(DTYPE), weights.to(DTYPE), input_precision=PRECISION)
        products *= tl.load(scaling_SP + slot * num_pieces + piece)
        at = out + row.to(tl.int64)[:, None] * out_stride + tl.load(block + 1) + output[None, :]
        is_place = is_row[:, None] & is_output[None, :]
        before = tl.load(at, mask=is_place, other=0.0)
        tl.store(at, (before.to(tl.float32) + products).to(out.dtype.element_ty), mask=is_place)
