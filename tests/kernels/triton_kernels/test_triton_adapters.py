"""Low-rank products of adapters in Triton against the table in torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import support.triton_interpreter  # noqa: F401 - repairs the interpreter
from penstock.kernels.adapters import AdapterTable, Piece, TableShape, TorchAdapterTable, TritonAdapterTable
from support.triton_device import DEVICE, needs_triton

NUM_SLOTS, NUM_INPUTS, MAX_RANK = 4, 133, 20
PIECES = (Piece(0, 70), Piece(70, 16), Piece(90, 65))
NUM_OUTPUTS = 160
# Ranks of each slot's pieces; 0 for none. Slot 2 stays empty.
RANKS = [(4, 0, 1), (16, 16, 16), (0, 0, 0), (20, 1, 17)]
# More than one block of rows, with requests of each adapter and of none.
SLOTS = [0, 0, -1, 3, 1, 1, 1, 2, -1, 3, 0, 1, 3, 0, -1, 1, 1, 1, 3, -1]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tables(dtype: torch.dtype, num_inputs: int | None, device: str = DEVICE) -> tuple[AdapterTable, AdapterTable]:
    """Tables of Triton and of torch with the same adapters."""
    generator = torch.Generator().manual_seed(0)
    pieces = PIECES if num_inputs else PIECES[:1]
    shape = TableShape(NUM_SLOTS, MAX_RANK, num_inputs, pieces)
    made = tuple(kind(shape, dtype, torch.device(device)) for kind in (TritonAdapterTable, TorchAdapterTable))
    for slot, ranks in enumerate(RANKS):
        packed = []
        for rank, piece in zip(ranks, pieces, strict=False):
            a = torch.randn(rank, num_inputs, generator=generator) / 10 if num_inputs else None
            b = torch.randn(piece.size, rank, generator=generator)
            packed.append(made[0].pack(a, b, 0.5 + slot) if rank else None)
        for table in made:
            table.write(slot, packed)
    return made


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_inputs", [NUM_INPUTS, None], ids=["linear", "embedding"])
def test_rows_get_the_product_of_their_adapter(dtype: torch.dtype, num_inputs: int | None) -> None:
    ours, reference = tables(torch.float32, num_inputs)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=DEVICE)
    x = torch.randn(len(SLOTS), num_inputs or MAX_RANK, device=DEVICE).to(dtype)
    base = torch.randn(len(SLOTS), NUM_OUTPUTS, device=DEVICE).to(dtype)

    found = ours.add_to(base.clone(), x, slots)

    expected = reference.add_to(base.double(), x.double(), slots)
    size = float(expected.abs().max())
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, atol=8 * torch.finfo(dtype).eps * size, rtol=1e-5)
    assert torch.equal(found[slots == -1], base[slots == -1])


@needs_triton
def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    ours, _ = tables(torch.float32, NUM_INPUTS)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=DEVICE)
    x, base = torch.randn(len(SLOTS), NUM_INPUTS, device=DEVICE), torch.randn(len(SLOTS), NUM_OUTPUTS, device=DEVICE)
    together = ours.add_to(base.clone(), x, slots)
    for row in (0, 3, 4, 7, 8, 17):
        one = slice(row, row + 1)
        assert torch.equal(ours.add_to(base[one].clone(), x[one], slots[one].clone()), together[one])


@needs_triton
def test_outputs_may_be_rows_of_a_wider_tensor() -> None:
    ours, _ = tables(torch.float32, NUM_INPUTS)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=DEVICE)
    wide_x, wide = torch.randn(20, NUM_INPUTS + 9, device=DEVICE), torch.zeros(20, NUM_OUTPUTS + 7, device=DEVICE)
    x = wide_x[:, 4 : 4 + NUM_INPUTS]
    ours.add_to(wide[:, 3 : 3 + NUM_OUTPUTS], x, slots)
    expected = ours.add_to(torch.zeros(20, NUM_OUTPUTS, device=DEVICE), x.contiguous(), slots)
    assert torch.equal(wide[:, 3 : 3 + NUM_OUTPUTS], expected)
    assert not wide[:, :3].any()
    assert not wide[:, 3 + NUM_OUTPUTS :].any()


_COMPILED = """
import sys
import pytest, torch
sys.path[:0] = {paths!r}
from support.triton_compile import LEAST_SHARED, compile_only
from penstock.kernels.adapters import Piece, TableShape, TritonAdapterTable
counts = compile_only(pytest.MonkeyPatch(), most_shared=LEAST_SHARED)
for dtype in (torch.bfloat16, torch.float32):
    for rank in (16, 256):
        shape = TableShape(4, rank, 4096, (Piece(0, 4096), Piece(4096, 1024)))
        table = TritonAdapterTable(shape, dtype, torch.device("cpu"))
        for num_rows in (1, 33):
            slots = torch.zeros(num_rows, dtype=torch.int32)
            table.add_to(torch.empty(num_rows, 5120, dtype=dtype), torch.empty(num_rows, 4096, dtype=dtype), slots)
print(sum(counts.values()))
"""


def test_the_kernels_compile_for_any_gpu_once_for_all_numbers_of_rows() -> None:
    """In a process without the interpreter; no GPU is needed."""
    script = _COMPILED.format(paths=[str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "8"
