"""The memory of a GPU by the driver's management library (NVML), which needs neither torch nor a CUDA context."""

from __future__ import annotations

import ctypes
from importlib.metadata import PackageNotFoundError, version

from penstock.device.limits import MemoryLimit

_LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_memory(index: int = 0) -> MemoryLimit | None:
    """What the GPU has and what of it is free; None where there is no GPU, or the installed torch cannot use it."""
    if not _torch_has_cuda():
        return None
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    if library.nvmlInit_v2() != 0:
        return None
    try:
        handle, memory = ctypes.c_void_p(), _Memory()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            return None
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        return MemoryLimit(total_bytes=memory.total, free_bytes=memory.free)
    finally:
        library.nvmlShutdown()


def _torch_has_cuda() -> bool:
    """By the name of the build, since importing torch to ask it takes longer than all else."""
    try:
        return not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
