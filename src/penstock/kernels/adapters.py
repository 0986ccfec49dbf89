"""Low-rank products of LoRA adapters: tables of all adapters of one linear layer, and their application.

An adapter adds scaling * B (A x) to a layer's output, for rows of its own requests only. Adapters lie in numbered
slots; a slot of -1 stands for none. A layer's outputs are one or several pieces, such as query, key and value, each
with a product of its own.

Suffixes: T rows (tokens), S slots, P pieces, R rank, I input features, O output features of a piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.native import NATIVE, WEIGHT_TYPES, NativeKernels
from penstock.kernels.triton import has_triton

# Output features of a panel of the C++ kernels (`csrc/kernels.h`).
_PANEL = 16
# Largest rank of the Triton kernels, whose sums of a block of rows fit into registers.
_MAX_TRITON_RANK = 256


class Piece(NamedTuple):
    """A range of a layer's output features."""

    first: int
    size: int


@dataclass(frozen=True, slots=True)
class TableShape:
    """num_slots: adapters at once. in_features: None where the table is given A x instead of x."""

    num_slots: int
    max_rank: int
    in_features: int | None
    pieces: tuple[Piece, ...]


class PackedAdapter(NamedTuple):
    """An adapter's matrices for one piece, in the layout of a table. a: None where the table is given A x."""

    a: Tensor | None
    b: Tensor
    rank: int
    scaling: float


class AdapterTable(ABC):
    """The adapters of one layer, by slot, at addresses that never change. A new table's slots are empty."""

    def __init__(self, shape: TableShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._is_filled = [False] * shape.num_slots

    @abstractmethod
    def pack(self, a_RI: Tensor | None, b_OR: Tensor, scaling: float) -> PackedAdapter:
        """Convert matrices to the table's layout and dtype, on the host."""

    def write(self, slot: int, pieces: Sequence[PackedAdapter | None]) -> None:
        """Put an adapter into a slot; None for pieces that it does not change."""
        # A copy that fails may leave a part of the adapter.
        self._is_filled[slot] = True
        self._write(slot, pieces)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        if self._is_filled[slot]:
            self._write(slot, [None] * len(self.shape.pieces))
            self._is_filled[slot] = False

    @abstractmethod
    def _write(self, slot: int, pieces: Sequence[PackedAdapter | None]) -> None:
        """As `write`."""

    @abstractmethod
    def add_to(self, out_TX: Tensor, x_TI: Tensor, slots_T: Tensor) -> Tensor:
        """Add the adapters' products to the layer's output, in place; returns it. slots_T: int32, of each row."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of the table."""


class TorchAdapterTable(AdapterTable):
    """Products with the matrices of all slots, masked by the slot of each row: no synchronisation with the device."""

    def __init__(self, shape: TableShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        num_slots, rank = shape.num_slots, shape.max_rank

        sizes, num_inputs = [piece.size for piece in shape.pieces], shape.in_features
        self._a_PSRI: Tensor | None = None
        if num_inputs is not None:
            self._a_PSRI = torch.zeros(len(sizes), num_slots, rank, num_inputs, dtype=dtype, device=device)
        # B of all slots of the first piece, then of the next one.
        self._b_XR = torch.zeros(num_slots * sum(sizes), rank, dtype=dtype, device=device)
        of_pieces = self._b_XR.split([num_slots * size for size in sizes])
        self._b = [b_XR.view(num_slots, size, rank) for b_XR, size in zip(of_pieces, sizes, strict=True)]
        self._ranks_SP = torch.zeros(num_slots, len(sizes), dtype=torch.int32, device=device)
        self._scaling_SP = torch.zeros(num_slots, len(sizes), device=device)
        self._slots_S = torch.arange(num_slots, dtype=torch.int32, device=device)

    def pack(self, a_RI: Tensor | None, b_OR: Tensor, scaling: float) -> PackedAdapter:
        a_RI = None if a_RI is None else a_RI.to(self.dtype).contiguous()
        return PackedAdapter(a_RI, b_OR.to(self.dtype).contiguous(), b_OR.shape[1], scaling)

    def _write(self, slot: int, pieces: Sequence[PackedAdapter | None]) -> None:
        for index, packed in enumerate(pieces):
            rank = 0 if packed is None else packed.rank
            self._b[index][slot, :, rank:].zero_()
            self._ranks_SP[slot, index] = rank
            self._scaling_SP[slot, index] = 0.0 if packed is None else packed.scaling
            if self._a_PSRI is not None:
                self._a_PSRI[index, slot, rank:].zero_()
            if packed is None:
                continue
            self._b[index][slot, :, :rank].copy_(packed.b)
            if self._a_PSRI is not None and packed.a is not None:
                self._a_PSRI[index, slot, :rank].copy_(packed.a)

    def add_to(self, out_TX: Tensor, x_TI: Tensor, slots_T: Tensor) -> Tensor:
        dtype, rank, num_slots = x_TI.dtype, self.shape.max_rank, self.shape.num_slots
        is_of_TS = slots_T.unsqueeze(1) == self._slots_S
        for index, piece in enumerate(self.shape.pieces):
            scaling_TS = torch.where(is_of_TS, self._scaling_SP[:, index], 0.0).to(dtype)
            if self._a_PSRI is None:
                shrunk_TSR = x_TI.unsqueeze(1) * scaling_TS.unsqueeze(2)
            else:
                shrunk_TSR = F.linear(x_TI, self._a_PSRI[index].flatten(0, 1).to(dtype)).view(-1, num_slots, rank)
                shrunk_TSR = shrunk_TSR * scaling_TS.unsqueeze(2)
            expanded_TO = shrunk_TSR.flatten(1) @ self._b[index].to(dtype).transpose(1, 2).flatten(0, 1)
            out_TX.narrow(-1, piece.first, piece.size).add_(expanded_TO)
        return out_TX

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        a = () if self._a_PSRI is None else (self._a_PSRI,)
        return (*a, self._b_XR, self._ranks_SP, self._scaling_SP)


class TritonAdapterTable(TorchAdapterTable):
    """Triton kernels over the rows of each adapter, for a table on a GPU."""

    def __init__(self, shape: TableShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        from penstock.kernels.triton import adapters

        self._kernels = adapters
        sizes = [piece.size for piece in shape.pieces]
        first_rows = [shape.num_slots * sum(sizes[:index]) for index in range(len(sizes))]
        self._blocks_N4 = adapters.output_blocks(shape.pieces, first_rows, device)
        self._rows_of_slot = torch.tensor(sizes, dtype=torch.int32, device=device)

    def add_to(self, out_TX: Tensor, x_TI: Tensor, slots_T: Tensor) -> Tensor:
        if self._a_PSRI is None:
            shrunk_TPR = x_TI.unsqueeze(1)
        else:
            shrunk_TPR = self._kernels.shrink(x_TI, self._a_PSRI, self._ranks_SP, slots_T)
        self._kernels.expand(
            out_TX,
            shrunk_TPR,
            self._b_XR,
            self._rows_of_slot,
            self._blocks_N4,
            self._ranks_SP,
            self._scaling_SP,
            slots_T,
            x_TI.dtype,
        )
        return out_TX


class NativeAdapterTable(AdapterTable):
    """Penstock's C++ kernels: rows grouped by adapter, with the same bits in any batch. Rows are float32."""

    def __init__(self, kernels: NativeKernels, shape: TableShape, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype, torch.device("cpu"))
        self._kernels = kernels
        num_slots, num_pieces = shape.num_slots, len(shape.pieces)
        self._rank = _rounded_up(shape.max_rank)
        self._in_features = shape.in_features or 0
        b_sizes = [_rounded_up(piece.size) * shape.max_rank for piece in shape.pieces]
        self._b_starts = [sum(b_sizes[:index]) for index in range(num_pieces)]
        self._a_SPX = torch.empty(num_slots, num_pieces, self._rank * self._in_features, dtype=dtype)
        self._b_SX = torch.empty(num_slots, sum(b_sizes), dtype=dtype)
        self._ranks_SP = torch.zeros(num_slots, num_pieces, dtype=torch.int64)
        self._scaling_SP = torch.zeros(num_slots, num_pieces)
        pieces = zip(shape.pieces, self._b_starts, strict=True)
        self._pieces = torch.tensor([[piece.first, piece.size, start] for piece, start in pieces], dtype=torch.int64)

    def pack(self, a_RI: Tensor | None, b_OR: Tensor, scaling: float) -> PackedAdapter:
        a = None if a_RI is None else _in_panels(a_RI.to(self.dtype))
        return PackedAdapter(a, _in_panels(b_OR.to(self.dtype)), b_OR.shape[1], scaling)

    def _write(self, slot: int, pieces: Sequence[PackedAdapter | None]) -> None:
        for index, packed in enumerate(pieces):
            self._ranks_SP[slot, index] = 0 if packed is None else packed.rank
            if packed is None:
                continue
            if packed.a is not None:
                self._a_SPX[slot, index, : packed.a.numel()].copy_(packed.a)
            start = self._b_starts[index]
            self._b_SX[slot, start : start + packed.b.numel()].copy_(packed.b)
            self._scaling_SP[slot, index] = packed.scaling

    def add_to(self, out_TX: Tensor, x_TI: Tensor, slots_T: Tensor) -> Tensor:
        return self._kernels.adapters.add_to(
            out_TX,
            x_TI,
            slots_T,
            None if self.shape.in_features is None else self._a_SPX,
            self._b_SX,
            self._ranks_SP,
            self._scaling_SP,
            self._pieces,
            self.shape.num_slots,
            len(self.shape.pieces),
            self._in_features,
            self._rank,
            self._b_SX.shape[1],
            WEIGHT_TYPES[self.dtype],
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._a_SPX, self._b_SX, self._ranks_SP, self._scaling_SP


def adapter_table(
    shape: TableShape, dtype: torch.dtype, device: torch.device, compute_dtype: torch.dtype
) -> AdapterTable:
    """Create an empty table with the fastest kernels. compute_dtype: of the layer's rows."""
    if NATIVE is not None and device.type == "cpu" and compute_dtype is torch.float32:
        return NativeAdapterTable(NATIVE, shape, dtype)
    if device.type == "cuda" and has_triton() and shape.max_rank <= _MAX_TRITON_RANK:
        return TritonAdapterTable(shape, dtype, device)
    return TorchAdapterTable(shape, dtype, device)


def table_bytes(shape: TableShape, dtype: torch.dtype) -> int:
    """Upper bound of the bytes of a table with this shape."""
    num_inputs = (shape.in_features or 0) * len(shape.pieces)
    num_outputs = sum(_rounded_up(piece.size) for piece in shape.pieces)
    return shape.num_slots * _rounded_up(shape.max_rank) * (num_inputs + num_outputs) * dtype.itemsize


def _rounded_up(size: int) -> int:
    return -(-size // _PANEL) * _PANEL


def _in_panels(matrix_NK: Tensor) -> Tensor:
    """Lay a matrix out in panels of rows, zero-padded: [panel][K][rows of the panel], flat."""
    num_rows, depth = matrix_NK.shape
    padded_NK = F.pad(matrix_NK, (0, 0, 0, _rounded_up(num_rows) - num_rows))
    return padded_NK.view(-1, _PANEL, depth).transpose(1, 2).contiguous().flatten()
