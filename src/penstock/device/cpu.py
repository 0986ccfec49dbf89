"""CPU device: host memory, synchronous, no copies."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from penstock.device.backup import Backup, FileBackup
from penstock.device.base import CellWrites, Device, MemorySnapshot, PeakMemory, PendingCopy
from penstock.device.dtypes import DtypeChoice, choose_cpu_dtype
from penstock.device.forks import keep_forks_computing
from penstock.device.host_allocator import FREED_MEMORY, GIVE_BACK, KEEP, return_free_pages
from penstock.device.host_memory import give_back, ranges_of
from penstock.device.huge_pages import HAS_LARGE_PAGES, LARGE_PAGE, fresh_memory
from penstock.device.limits import cpu_quota, memory_limit
from penstock.device.process_setting import ProcessSetting
from penstock.device.tensor_memory import TensorMemory
from penstock.device.threads import BINDING, plan_threads
from penstock.device.throttling import ThrottleWatch

# MADV_POPULATE_WRITE, Linux 5.14 and later.
_POPULATE = 23
_NUM_THREADS = ProcessSetting(torch.get_num_threads, torch.set_num_threads)


class HostCopy(PendingCopy):
    """No copy: the tensors are in host memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def is_done(self) -> bool:
        return True

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self._tensors


class CpuDevice(Device):
    """num_threads: of all computation; None takes one per core of this process's affinity on one NUMA node.

    rank, num_ranks: of processes that share threads, cores and memory.
    """

    kind = "cpu"
    overlaps_with_host = False
    attention_backends = ("cpu_native", "cpu_paged", "reference")

    def __init__(self, num_threads: int | None = None, rank: int = 0, num_ranks: int = 1) -> None:
        keep_forks_computing()
        self.torch_device = torch.device("cpu")
        self.threads = plan_threads(num_threads, quota=cpu_quota(), rank=rank, num_ranks=num_ranks)
        self._num_ranks = num_ranks
        # Before threads start, which inherit the binding. Weights are packed later, so their memory is on the same
        # node.
        BINDING.bind(self, self.threads.cpus)
        self.num_threads = self.threads.num_threads
        _NUM_THREADS.want(self, self.num_threads)
        self._counts: TensorMemory | None = None
        self._throttling = ThrottleWatch()

    def describe(self) -> str:
        threads = f"{self.num_threads} thread{'s' if self.num_threads != 1 else ''}"
        return f"CPU, {threads} ({self.threads.reason}), {torch.backends.cpu.get_cpu_capability()}"

    def choose_dtype(self, requested: str, checkpoint: str, stored: str | None = None) -> DtypeChoice:
        return choose_cpu_dtype(requested, checkpoint, stored)

    def memory_snapshot(self) -> MemorySnapshot:
        limit = memory_limit()
        return MemorySnapshot(
            total=limit.total_bytes // self._num_ranks,
            free=limit.free_bytes // self._num_ranks,
            used_by_process=psutil.Process().memory_info().rss,
        )

    @contextmanager
    def measure_peak(self) -> Iterator[PeakMemory]:
        peak = PeakMemory()
        with TensorMemory() as memory:
            self._counts = memory
            try:
                yield peak
            finally:
                self._counts = None
        peak.bytes_above_start, peak.bytes_kept = memory.peak_bytes, memory.num_bytes

    def allocate(self, num_bytes: int) -> Tensor:
        if num_bytes >= LARGE_PAGE and HAS_LARGE_PAGES:
            memory = fresh_memory(num_bytes)
            if self._counts is not None:  # not allocated by an operator
                self._counts.count(memory)
            return memory
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def make_pages_ready(self, memory: Tensor) -> bool:
        start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = memory.data_ptr() + memory.nbytes
        madvise = getattr(ctypes.CDLL(None), "madvise", None)
        return madvise is not None and madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE) == 0

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def scatter(self, writes: Sequence[CellWrites]) -> None:
        # Ten times as fast as a torch operator for a few values.
        for cells, indices, values in writes:
            cells.numpy()[indices] = values

    def download(self, tensors: Sequence[Tensor]) -> PendingCopy:
        return HostCopy(tensors)

    def synchronize(self) -> None:
        pass

    def return_unused_memory(self) -> None:
        return_free_pages()

    def back_up(self, tensors: Sequence[Tensor], folder: Path) -> Backup:
        return FileBackup(tensors, folder)

    def release(self, tensors: Sequence[Tensor]) -> int:
        FREED_MEMORY.want(self, GIVE_BACK)
        return give_back(ranges_of(tensors))

    def restore(self, tensors: Sequence[Tensor]) -> None:
        FREED_MEMORY.want(self, KEEP)

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        FREED_MEMORY.want(self, GIVE_BACK)
        try:
            with super().loading_weights():
                yield
        finally:
            FREED_MEMORY.want(self, KEEP)

    def close(self) -> None:
        self._throttling.close()
        FREED_MEMORY.give_up(self)
        _NUM_THREADS.give_up(self)
        BINDING.release(self)
