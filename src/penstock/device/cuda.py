"""CUDA device: asynchronous work, a second stream for copies to the host, torch's caching allocator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from penstock.device.base import Device, MemorySnapshot, PeakMemory, PendingCopy
from penstock.device.dtypes import DtypeChoice, choose_cuda_dtype
from penstock.device.limits import MemoryLimit
from penstock.errors import UnsupportedFeature

_BF16_CAPABILITY = (8, 0)


class CudaCopy(PendingCopy):
    """A copy on its own stream. Keeps the device tensors, so that the allocator does not reuse their memory."""

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        self._sources = list(tensors)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Pinned memory: a copy to pageable memory would block the host.
            self._tensors = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def is_done(self) -> bool:
        is_done = bool(self._event.query())
        if is_done:
            self._sources.clear()
        return is_done

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self._tensors


class CudaDevice(Device):
    """One GPU of this process."""

    kind = "cuda"
    overlaps_with_host = True
    attention_backends = ("torch_varlen", "reference")

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._copy_stream = torch.cuda.Stream(self.torch_device)

    def describe(self) -> str:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"

    def choose_dtype(self, requested: str, checkpoint: str, stored: str | None = None) -> DtypeChoice:
        choice = choose_cuda_dtype(requested, checkpoint)
        capability = torch.cuda.get_device_capability(self.torch_device)
        if choice.name == "bfloat16" and capability < _BF16_CAPABILITY:
            raise UnsupportedFeature(
                f"dtype='bfloat16' needs a GPU of compute capability 8.0, but this one has "
                f"{capability[0]}.{capability[1]}. Use dtype='float16' or dtype='float32'."
            )
        return choice

    def memory_snapshot(self) -> MemorySnapshot:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return MemorySnapshot(total=total, free=free, used_by_process=torch.cuda.memory_reserved(self.torch_device))

    @contextmanager
    def measure_peak(self) -> Iterator[PeakMemory]:
        peak = PeakMemory()
        self.return_unused_memory()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        start = torch.cuda.memory_allocated(self.torch_device)
        yield peak
        self.synchronize()
        peak.bytes_above_start = torch.cuda.max_memory_allocated(self.torch_device) - start
        peak.bytes_kept = torch.cuda.memory_allocated(self.torch_device) - start

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def upload(self, array: np.ndarray) -> Tensor:
        # The pinned copy is freed at once, but torch's host allocator reuses it only after the copy has run.
        return torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensors: Sequence[Tensor]) -> PendingCopy:
        return CudaCopy(tensors, self._copy_stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def return_unused_memory(self) -> None:
        torch.cuda.empty_cache()


def gpu_memory() -> MemoryLimit | None:
    """Memory of the GPU; None without a GPU, or with a torch that cannot use it."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return MemoryLimit(total_bytes=total, free_bytes=free)
