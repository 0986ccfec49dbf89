"""The interface that a kind of device implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.device.dtypes import DtypeChoice

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,  # of a KV cache
}


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Bytes at one moment.

    total: what this process could use if it were alone.
    free: what it could still take.
    used_by_process: what it holds now.
    """

    total: int
    free: int
    used_by_process: int


@dataclass(slots=True)
class PeakMemory:
    """Filled when the block of `Device.measure_peak` ends: bytes of tensors above the level at its start.

    bytes_above_start: at most. bytes_kept: at its end.
    """

    bytes_above_start: int = 0
    bytes_kept: int = 0


class PendingCopy(ABC):
    """Tensors on their way to the host."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether `tensors` may be read; never waits."""

    @property
    @abstractmethod
    def tensors(self) -> Sequence[Tensor]:
        """The host copies, in the order given."""


class Device(ABC):
    """One device of this process.

    kind: "cpu" or "cuda". overlaps_with_host: work is queued, so the host can run ahead of it.
    attention_backends: names of the backends that may work here, best first.
    """

    kind: str
    torch_device: torch.device
    overlaps_with_host: bool
    attention_backends: tuple[str, ...]

    @abstractmethod
    def describe(self) -> str:
        """The device in a few words, for the log."""

    @abstractmethod
    def choose_dtype(self, requested: str, checkpoint: str, stored: str | None = None) -> DtypeChoice:
        """The dtypes for a request ("auto" or a name) and a checkpoint.

        checkpoint: what config.json names. stored: what the files' matrices are in, where that is known.
        Raises UnsupportedFeature when the device cannot compute in it.
        """

    @abstractmethod
    def memory_snapshot(self) -> MemorySnapshot: ...

    @abstractmethod
    @contextmanager
    def measure_peak(self) -> Iterator[PeakMemory]:
        """Measure how far the memory of tensors rises above its present level inside the block."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of zeros: attention multiplies by zero what is masked, and garbage may be NaN."""

    def make_pages_ready(self, memory: Tensor) -> bool:
        """Let the system hand out now what it would when this memory, contiguous, is first written to.

        Changes no value, and may run beside what reads and writes there. False where it cannot, or need not.
        """
        return False

    @abstractmethod
    def upload(self, array: np.ndarray) -> Tensor:
        """A device tensor with the array's contents, without waiting. The array must not be changed afterwards."""

    def scatter(self, cells: Tensor, index: np.ndarray, values: np.ndarray) -> None:
        """cells[index] = values, without waiting: a flat tensor of the device, int64 numbers of its cells, its dtype.

        The arrays must not be changed afterwards. Of two values for one cell, either may be the one that stays.
        """
        cells.index_copy_(0, self.upload(index), self.upload(values))

    @abstractmethod
    def download(self, tensors: Sequence[Tensor]) -> PendingCopy:
        """Begin to copy the tensors to the host; work queued later does not delay the copy.

        Nobody may write to them any more: a device that shares the host's memory hands them over as they are.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    @abstractmethod
    def return_unused_memory(self) -> None:
        """Give back to the system what the allocator keeps of freed memory."""

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        """Load weights in this block: what it frees goes back to the system.

        Elsewhere what a step frees may stay with the process, for the next one.
        """
        try:
            yield
        finally:
            self.return_unused_memory()

    def close(self) -> None:  # noqa: B027 - a device that sets nothing has nothing to restore
        """Leave the process as it was before this device, unless others still need it; harmless when called twice."""
