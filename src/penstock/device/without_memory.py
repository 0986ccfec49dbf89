"""Meta device, which stands for another one in memory plans (`device.stand_in`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from penstock.device.base import CellWrites, Device, MemorySnapshot, PeakMemory, PendingCopy
from penstock.device.cpu import CpuDevice
from penstock.device.cuda import CudaDevice
from penstock.device.dtypes import DtypeChoice
from penstock.device.operator_sizes import META
from penstock.device.tensor_memory import TensorMemory


class NothingToCopy(PendingCopy):
    """Result of a copy from the meta device: empty."""

    def is_done(self) -> bool:
        return True

    @property
    def tensors(self) -> Sequence[Tensor]:
        return ()


class DeviceWithoutMemory(Device):
    """Stands for a device of some kind. Must be used within `standing_for` this kind."""

    overlaps_with_host = False

    def __init__(self, kind: str) -> None:
        stands_for = CpuDevice if kind == "cpu" else CudaDevice
        self.kind = kind
        self.torch_device = META
        self.attention_backends = stands_for.attention_backends
        self.captures_graphs = stands_for.captures_graphs

    def describe(self) -> str:
        return f"{self.kind} without memory"

    def choose_dtype(self, requested: str, checkpoint: str, stored: str | None = None) -> DtypeChoice:
        raise AssertionError("a plan chooses the dtype before it has a device")

    def memory_snapshot(self) -> MemorySnapshot:
        raise AssertionError("a device without memory has no snapshot")

    @contextmanager
    def measure_peak(self) -> Iterator[PeakMemory]:
        peak = PeakMemory()
        with TensorMemory() as memory:
            yield peak
        peak.bytes_above_start, peak.bytes_kept = memory.peak_bytes, memory.num_bytes

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=META)

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(META)

    def scatter(self, writes: Sequence[CellWrites]) -> None:
        pass

    def download(self, tensors: Sequence[Tensor]) -> PendingCopy:
        return NothingToCopy()

    def synchronize(self) -> None:
        pass

    def return_unused_memory(self) -> None:
        pass
