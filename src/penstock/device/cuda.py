"""CUDA device: asynchronous work, a second stream for copies to the host, torch's caching allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.device.backup import Backup, HostBackup
from penstock.device.base import Device, MemorySnapshot, PeakMemory, PendingCopy
from penstock.device.capability import choices_of
from penstock.device.dtypes import DtypeChoice, choose_cuda_dtype
from penstock.device.limits import MemoryLimit
from penstock.device.process_setting import ProcessSetting
from penstock.errors import UnsupportedFeature

INVARIANT_BACKENDS = ("triton_invariant",)
_MATMUL_PRECISION = ProcessSetting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)


class CudaCopy(PendingCopy):
    """A copy on its own stream. Keeps the device tensors, so that the allocator does not reuse their memory."""

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        self._sources = list(tensors)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
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
    """GPU of this process."""

    kind = "cuda"
    overlaps_with_host = True
    captures_graphs = True
    compiles_kernels = True
    keeps_addresses = False
    attention_backends: tuple[str, ...] = ("triton_paged", "torch_varlen", "reference")

    def __init__(self, index: int = 0, matmul_precision: str = "highest", *, batch_invariant: bool = False) -> None:
        """matmul_precision: of float32 products, until `close`. batch_invariant: no other attention is a candidate."""
        if batch_invariant:
            self.attention_backends = INVARIANT_BACKENDS
        self.torch_device = torch.device("cuda", index)
        _MATMUL_PRECISION.want(self, matmul_precision)
        torch.cuda.set_device(self.torch_device)
        self._copy_stream = torch.cuda.Stream(self.torch_device)
        self._capture_stream = torch.cuda.Stream(self.torch_device)
        # One memory pool for all graphs: they never run at the same time.
        self._graph_pool = torch.cuda.graph_pool_handle()
        # Sizes of storages whose memory was given back.
        self._released: dict[int, int] = {}

    def describe(self) -> str:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"

    def choose_dtype(self, requested: str, checkpoint: str, stored: str | None = None) -> DtypeChoice:
        choice = choose_cuda_dtype(requested, checkpoint)
        capability = torch.cuda.get_device_capability(self.torch_device)
        if choice.name == "bfloat16" and not choices_of(capability).has_bfloat16:
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
        return _pinned(array).to(self.torch_device, non_blocking=True)

    def write(self, tensor: Tensor, array: np.ndarray) -> None:
        tensor.copy_(_pinned(array), non_blocking=True)

    def download(self, tensors: Sequence[Tensor]) -> PendingCopy:
        return CudaCopy(tensors, self._copy_stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return self.capture_pieces(lambda _: work())

    def capture_pieces(self, work: Callable[[Callable[[Callable[[], object]], None]], None]) -> Callable[[], None]:
        calls: list[Callable[[], object]] = []
        stream = self._capture_stream
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()

        def begin() -> None:
            # `torch.cuda.graph` would collect garbage and wait for the device. Other threads may go on using it.
            graph.capture_begin(self._graph_pool, capture_error_mode="thread_local")

        def between(call: Callable[[], object]) -> None:
            nonlocal graph
            graph.capture_end()
            calls.extend((graph.replay, call))
            graph = torch.cuda.CUDAGraph()
            begin()

        with torch.cuda.stream(stream):
            begin()
            try:
                work(between)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        if not calls:
            return graph.replay
        calls.append(graph.replay)

        def replay() -> None:
            for call in calls:
                call()

        return replay

    def graph_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == tuple(self._graph_pool))

    def library_bytes(self, start: MemorySnapshot) -> int:
        now = self.memory_snapshot()
        return (start.free - now.free) - (now.used_by_process - start.used_by_process)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def back_up(self, tensors: Sequence[Tensor], folder: Path) -> Backup:
        return HostBackup(tensors)

    def release(self, tensors: Sequence[Tensor]) -> int:
        self.synchronize()
        freed = 0
        for storage in _storages(tensors):
            # All views share the storage, and get its new memory with it.
            if size := storage.nbytes():
                self._released[storage._cdata] = size
                storage.resize_(0)
                freed += size
        self.return_unused_memory()
        return freed

    def restore(self, tensors: Sequence[Tensor]) -> None:
        for storage in _storages(tensors):
            if size := self._released.pop(storage._cdata, 0):
                storage.resize_(size)
                torch.empty(0, dtype=torch.uint8, device=self.torch_device).set_(storage).zero_()

    def close(self) -> None:
        _MATMUL_PRECISION.give_up(self)

    def return_unused_memory(self) -> None:
        torch.cuda.empty_cache()


def _pinned(array: np.ndarray) -> Tensor:
    # Contiguous: torch would copy another layout through pageable memory, which blocks the host.
    return torch.from_numpy(np.asarray(array, order="C")).pin_memory()


def _storages(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    """Storages of tensors on a GPU, each once."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors if tensor.is_cuda}
    return list(found.values())


def gpu_memory() -> MemoryLimit | None:
    """Memory of the GPU; None without a GPU, or with a torch that cannot use it."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return MemoryLimit(total_bytes=total, free_bytes=free)
