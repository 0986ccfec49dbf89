"""Staged host-to-device writes, gathered while a step is prepared and uploaded in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.device import CellWrites, Device


class StagedTensor:
    """A device tensor [rows, width] whose cells the host writes through `stage` and `flush`.

    A flush uploads all staged writes at once, those of several tensors too (`flush_together`), and scatters them with
    one operator per tensor. Two writes to one cell within a flush have no defined order.
    """

    def __init__(self, device: Device, rows: int, width: int, dtype: torch.dtype) -> None:
        self.tensor = device.allocate(rows * width * dtype.itemsize).view(dtype).view(rows, width)
        self._cells = self.tensor.view(-1)
        self.device = device
        self._width = width
        # (row, first cell, values) of each write.
        self._staged: list[tuple[int, int, Sequence[int]]] = []
        self._host_dtype = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype

    def stage(self, row: int, start: int, values: Sequence[int]) -> None:
        """Write `values`, which must stay as they are, to cells start, start + 1, … of `row` at the next flush."""
        if not values:
            return
        if start < 0 or start + len(values) > self._width:
            raise IndexError(f"cells {start}..{start + len(values)} are outside a row of {self._width}")
        self._staged.append((row, row * self._width + start, values))

    def discard(self, row: int) -> None:
        """Drop what is staged for `row`, whose request could not be added."""
        self._staged = [write for write in self._staged if write[0] != row]

    def flush(self) -> None:
        """Upload the staged writes."""
        flush_together([self])

    def take(self) -> CellWrites | None:
        """Return the staged writes, which are staged no more; None if there are none."""
        staged = self._staged
        if not staged:
            return None
        self._staged = []
        if len(staged) == sum(len(values) for _, _, values in staged):
            # One cell each, as when decoding requests get a block.
            index = np.array([first for _, first, _ in staged])
            cells = np.array([values[0] for _, _, values in staged], dtype=self._host_dtype)
        else:
            index = np.concatenate([np.arange(first, first + len(values)) for _, first, values in staged])
            cells = np.concatenate([np.asarray(values, dtype=self._host_dtype) for _, _, values in staged])
        return CellWrites(self._cells, index, cells)


def flush_together(tensors: Sequence[StagedTensor]) -> None:
    """Upload the staged writes of tensors of one device in one copy."""
    writes = [write for tensor in tensors if (write := tensor.take()) is not None]
    if writes:
        tensors[0].device.scatter(writes)


class SlotParameter:
    """Parameter with one small value per slot: the host array is authoritative, the device has its last published copy.

    A step that is queued on the device keeps the copy it was launched with, whatever the host writes later.
    """

    def __init__(self, device: Device, num_slots: int, dtype: type[np.generic], neutral: float) -> None:
        self.host = np.full(num_slots, neutral, dtype=dtype)
        self._neutral = neutral
        self._device = device
        self._published = device.upload(self.host.copy())
        self._is_stale = False
        # Slots with a non-neutral value, whether a request holds them or not.
        self._set_slots: set[int] = set()

    def set(self, slot: int, value: float) -> None:
        if self.host[slot] != value:
            self.host[slot] = value
            self._is_stale = True
            if self.host[slot] != self._neutral:
                self._set_slots.add(slot)
            else:
                self._set_slots.discard(slot)

    @property
    def tensor(self) -> Tensor:
        """The device's copy [num_slots], uploaded again if the host's has changed."""
        if self._is_stale:
            self._published = self._device.upload(self.host.copy())
            self._is_stale = False
        return self._published

    def any_set(self, slots_np: np.ndarray) -> bool:
        """Whether one of the slots has a non-neutral value."""
        return bool(self._set_slots) and bool((self.host[slots_np] != self._neutral).any())
