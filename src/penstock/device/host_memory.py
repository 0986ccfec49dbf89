"""Physical memory behind tensors of the host: given back to the system while the addresses stay."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

from torch import Tensor

_DONTNEED = 4


def ranges_of(tensors: Iterable[Tensor]) -> list[range]:
    """Addresses of the memory of tensors, in their order; overlapping ones are one range.

    Leaves out tensors without memory of their own process: opaque ones, and those that processes share.
    """
    found: list[range] = []
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.is_mkldnn or not tensor.numel() or tensor.is_shared():
            continue
        span = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True)) + 1
        start = tensor.data_ptr()
        found.append(range(start, start + span * tensor.element_size()))
    merged: list[range] = []
    for one in sorted(found, key=lambda one: (one.start, one.stop)):
        if merged and one.start < merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, one.stop))
        else:
            merged.append(one)
    return merged


def bytes_at(addresses: range) -> memoryview:
    """The bytes of a range, which can be written."""
    return memoryview((ctypes.c_char * len(addresses)).from_address(addresses.start)).cast("B")


def give_back(ranges: Iterable[range]) -> int:
    """Give the whole pages of these ranges back; return the bytes that had memory. They read as zeros until written.

    Memory of mapped files and locked memory stays.
    """
    libc = ctypes.CDLL(None)
    madvise = getattr(libc, "madvise", None)
    freed = 0
    for one in ranges:
        start = -(-one.start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = one.stop // mmap.PAGESIZE * mmap.PAGESIZE - start
        if size > 0 and madvise is not None:
            resident = resident_bytes(start, size)
            if madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _DONTNEED) == 0:
                freed += resident
    return freed


def resident_bytes(start: int, size: int) -> int:
    """Bytes of whole pages that have memory (mincore)."""
    num_pages = size // mmap.PAGESIZE
    pages = (ctypes.c_ubyte * num_pages)()
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    if mincore is None or mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) != 0:
        return size
    return num_pages * mmap.PAGESIZE - bytes(pages).count(0) * mmap.PAGESIZE
