"""Interface of devices."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.device.backup import Backup
from penstock.device.dtypes import DtypeChoice
from penstock.errors import UnsupportedFeature, WaitTimeout

_POLL_INTERVAL_S = 50e-6

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,  # of a KV cache
    "fp8": torch.float8_e4m3fn,  # of a KV cache
}


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Memory in bytes at one moment.

    total: usable by this process if it were alone.
    free: still available.
    used_by_process: in use by this process.
    """

    total: int
    free: int
    used_by_process: int


@dataclass(slots=True)
class PeakMemory:
    """Result of `Device.measure_peak`, set at its end: bytes of tensors above the level at its start.

    bytes_above_start: peak. bytes_kept: at the end.
    """

    bytes_above_start: int = 0
    bytes_kept: int = 0


class PendingCopy(ABC):
    """Asynchronous copy of tensors to the host."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether `tensors` may be read; does not wait."""

    @property
    @abstractmethod
    def tensors(self) -> Sequence[Tensor]:
        """Host copies, in the order given."""


class CellWrites(NamedTuple):
    """cells[indices] = values: a flat device tensor, int64 indices, and values of its dtype.

    For duplicate indices either value may win.
    """

    cells: Tensor
    indices: np.ndarray
    values: np.ndarray


def wait_until(is_done: Callable[[], bool], timeout_s: float, describe: Callable[[], str]) -> None:
    """Poll until `is_done()`.

    describe: text of the wait for the error. Raises WaitTimeout after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            raise WaitTimeout(f"{describe()} The device hangs or is overloaded.")
        time.sleep(_POLL_INTERVAL_S)


class Device(ABC):
    """Device of this process: memory, copies, streams and graphs.

    kind: "cpu" or "cuda". overlaps_with_host: work is asynchronous, so the host can run ahead.
    attention_backends: names of candidate backends, best first. captures_graphs: whether `capture` works.
    compiles_kernels: whether kernels are compiled at their first use, so that warm-up has to run them all.
    keeps_addresses: whether memory that was given back (`release`) comes again at the same addresses.
    """

    kind: str
    torch_device: torch.device
    overlaps_with_host: bool
    captures_graphs: bool = False
    compiles_kernels: bool = False
    keeps_addresses: bool = True
    attention_backends: tuple[str, ...]

    @abstractmethod
    def describe(self) -> str:
        """Describe the device for the log."""

    @abstractmethod
    def choose_dtype(self, requested: str, checkpoint: str, stored: str | None = None) -> DtypeChoice:
        """Choose dtypes for a request ("auto" or a name) and a checkpoint.

        checkpoint: dtype in config.json. stored: dtype of the matrices in the weight files, if known.
        Raises UnsupportedFeature when the device cannot compute in it.
        """

    @abstractmethod
    def memory_snapshot(self) -> MemorySnapshot: ...

    @abstractmethod
    @contextmanager
    def measure_peak(self) -> Iterator[PeakMemory]:
        """Measure the peak of tensor memory above its present level inside the block."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate zeros, uint8 [num_bytes]: masked positions are multiplied by zero, and garbage may be NaN."""

    def make_pages_ready(self, memory: Tensor) -> bool:
        """Populate the pages of this contiguous memory now instead of at the first write.

        Changes no value, and may run concurrently with reads and writes. False where it is not possible or not needed.
        """
        return False

    @abstractmethod
    def upload(self, array: np.ndarray) -> Tensor:
        """Copy an array to the device without waiting. The array must not be changed afterwards."""

    def write(self, tensor: Tensor, array: np.ndarray) -> None:
        """Copy an array into a contiguous device tensor of its shape and dtype, without waiting.

        The array must not be changed afterwards.
        """
        tensor.copy_(self.upload(array))

    def scatter(self, writes: Sequence[CellWrites]) -> None:
        """Write cells of device tensors, in this order and in one upload, without waiting."""
        arrays = [array for write in writes for array in (write.indices, write.values)]
        # Every array begins at a multiple of 8 bytes, as its view as numbers must.
        sizes = [-(-array.nbytes // 8) * 8 for array in arrays]
        packed = np.zeros(sum(sizes), dtype=np.uint8)
        for array, end, size in zip(arrays, accumulate(sizes), sizes, strict=True):
            packed[end - size : end - size + array.nbytes] = array.view(np.uint8)
        parts = self.upload(packed).split(sizes)
        for write, indices, values in zip(writes, parts[::2], parts[1::2], strict=True):
            cells = write.cells
            cells.index_copy_(0, indices.view(torch.int64), values[: write.values.nbytes].view(cells.dtype))

    @abstractmethod
    def download(self, tensors: Sequence[Tensor]) -> PendingCopy:
        """Start copying the tensors to the host; later work does not delay the copy.

        The tensors must not be written to any more: a device with host memory returns them without a copy.
        """

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the kernels that `work` launches, without running them, and return a function that runs them.

        Each replay reads and writes the addresses of the capture: `work` may read persistent tensors only, must not
        wait for the device, and its results are overwritten by the next replay.
        Raises RuntimeError where a kernel or a call cannot be captured.
        """
        raise UnsupportedFeature(f"device {self.kind!r} captures no graphs")

    def capture_pieces(self, work: Callable[[Callable[[Callable[[], object]], None]], None]) -> Callable[[], None]:
        """Capture `work(between)` as several graphs, as `capture` does.

        Each `between(call)` ends one and begins the next; `call` does not run during the capture, and runs between them
        in every replay.
        """
        raise UnsupportedFeature(f"device {self.kind!r} captures no graphs")

    def graph_bytes(self) -> int:
        """Memory pool of all captured graphs, in bytes."""
        return 0

    def library_bytes(self, start: MemorySnapshot) -> int:
        """Bytes that libraries have taken since `start`, beside tensors; 0 where it cannot be told apart.

        Less than 0 if other processes have freed memory meanwhile.
        """
        return 0

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    @abstractmethod
    def return_unused_memory(self) -> None:
        """Return the allocator's free memory to the system."""

    def back_up(self, tensors: Sequence[Tensor], folder: Path) -> Backup:
        """Copy the content of tensors out of the device's memory. folder: place of a file, where one is written.

        Raises OutOfMemory without room for it.
        """
        raise UnsupportedFeature(f"device {self.kind!r} backs up no tensors")

    def release(self, tensors: Sequence[Tensor]) -> int:
        """Give the memory of these tensors back to the system; return the bytes. No other tensor may share it.

        The tensors stay, and their content is undefined. They must not be used before `restore`.
        """
        raise UnsupportedFeature(f"device {self.kind!r} gives no memory back")

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Let tensors after a `release` have memory again, of zeros or with parts of their earlier content."""
        raise UnsupportedFeature(f"device {self.kind!r} gives no memory back")

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        """Load weights in this block: freed memory is returned to the system.

        Outside, memory that a step frees may stay with the process for the next step.
        """
        try:
            yield
        finally:
            self.return_unused_memory()

    def close(self) -> None:  # noqa: B027 - a device that sets nothing has nothing to restore
        """Restore process settings, unless other devices need them; may be called twice."""
