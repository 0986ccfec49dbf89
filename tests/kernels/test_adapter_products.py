"""Low-rank products of adapters, compared with one row at a time in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.adapters import AdapterTable, NativeAdapterTable, Piece, TableShape, TorchAdapterTable
from penstock.kernels.native import NATIVE

NUM_SLOTS, NUM_INPUTS = 5, 37
PIECES = (Piece(0, 20), Piece(20, 16), Piece(40, 33))
NUM_OUTPUTS = 75
# Ranks of each slot's pieces; 0 for none. Slot 3 stays empty.
RANKS = [(4, 0, 1), (16, 16, 16), (0, 19, 3), (0, 0, 0), (20, 1, 17)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tables(shape: TableShape, dtype: torch.dtype) -> list[AdapterTable]:
    made: list[AdapterTable] = [TorchAdapterTable(shape, dtype, torch.device("cpu"))]
    return made if NATIVE is None else [*made, NativeAdapterTable(NATIVE, shape, dtype)]


def filled(dtype: torch.dtype, num_inputs: int | None = NUM_INPUTS) -> tuple[list[AdapterTable], list[list[Tensor]]]:
    """Tables of both implementations, and scaling * B A of each slot and piece (B alone without inputs)."""
    generator = torch.Generator().manual_seed(0)
    shape = TableShape(NUM_SLOTS, 20, num_inputs, PIECES if num_inputs else PIECES[2:])
    made = tables(shape, dtype)
    products = []
    for slot, ranks in enumerate(RANKS):
        matrices = []
        for rank, piece in zip(ranks[-len(shape.pieces) :], shape.pieces, strict=True):
            a = torch.randn(rank, num_inputs or 1, generator=generator).to(dtype)
            b = torch.randn(piece.size, rank, generator=generator).to(dtype)
            matrices.append((a if num_inputs else None, b, 0.5 + slot))
        for table in made:
            table.write(slot, [table.pack(*one) if one[1].shape[1] else None for one in matrices])
        products.append(
            [scaling * (b.double() if a is None else b.double() @ a.double()) for a, b, scaling in matrices]
        )
    return made, products


SLOTS = torch.tensor([1, 0, -1, 1, 3, 2, 4, 4, 0, 1, 1, 1, 1, -1], dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_get_the_product_of_their_adapter(dtype: torch.dtype) -> None:
    made, products = filled(dtype)
    x, base = torch.randn(len(SLOTS), NUM_INPUTS), torch.randn(len(SLOTS), NUM_OUTPUTS)
    expected = base.double()
    for row, slot in enumerate(SLOTS.tolist()):
        for piece, product in zip(PIECES, products[slot] if slot >= 0 else (), strict=slot >= 0):
            expected[row, piece.first : piece.first + piece.size] += product @ x[row].double()
    for table in made:
        torch.testing.assert_close(table.add_to(base.clone(), x, SLOTS).double(), expected, atol=2e-4, rtol=1e-4)


def test_rows_that_are_shrunk_already_are_expanded() -> None:
    made, products = filled(torch.float32, num_inputs=None)
    piece = PIECES[2]
    x, base = torch.randn(len(SLOTS), 20), torch.randn(len(SLOTS), NUM_OUTPUTS)
    expected = base.double()
    for row, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            (product,) = products[slot]
            expected[row, piece.first : piece.first + piece.size] += product @ x[row, : product.shape[1]].double()
    for table in made:
        torch.testing.assert_close(table.add_to(base.clone(), x, SLOTS).double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.skipif(NATIVE is None, reason="without the C++ kernels")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(num_threads: int) -> None:
    (_, table), _ = filled(torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        x, base = torch.randn(len(SLOTS), NUM_INPUTS), torch.randn(len(SLOTS), NUM_OUTPUTS)
        together = table.add_to(base.clone(), x, SLOTS)
        for row in range(len(SLOTS)):
            one = slice(row, row + 1)
            assert torch.equal(table.add_to(base[one].clone(), x[one], SLOTS[one].clone()), together[one])
    finally:
        torch.set_num_threads(before)


def test_a_slot_that_is_written_again_holds_the_new_adapter_alone() -> None:
    made, _ = filled(torch.float32)
    x, base = torch.randn(1, NUM_INPUTS), torch.randn(1, NUM_OUTPUTS)
    b, a = torch.randn(20, 2), torch.randn(2, NUM_INPUTS)
    for table in made:
        table.write(1, [table.pack(a, b, 2.0), None, None])
        found = table.add_to(base.clone(), x, torch.tensor([1], dtype=torch.int32))
        expected = base.clone()
        expected[:, :20] += 2 * x @ a.T @ b.T
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_slot_is_empty_once_it_is_cleared_even_if_its_adapter_was_written_in_part() -> None:
    made, _ = filled(torch.float32)
    x, base = torch.randn(1, NUM_INPUTS), torch.randn(1, NUM_OUTPUTS)
    for table in made:
        packed = table.pack(torch.randn(2, NUM_INPUTS), torch.randn(20, 2), 2.0)
        with pytest.raises(RuntimeError):
            table.write(1, [packed, packed._replace(b=torch.randn(3, 3, 3, 3)), None])
        table.clear(1)
        assert torch.equal(table.add_to(base.clone(), x, torch.tensor([1], dtype=torch.int32)), base)
