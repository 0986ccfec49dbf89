"""Memory for packed weights, in large pages where the system has them.

A product reads its whole weight in order. With pages of 4 KiB the processor's prefetchers stop at the end of each, and
looking up the next one's place in memory costs time: streaming a weight is up to a third slower than with large pages.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

CACHE_LINE = 64
# What Linux has on x86-64, and with 4 KiB pages on Arm.
_LARGE_PAGE = 2 << 20


def weight_memory(num_bytes: int) -> Tensor:
    """Uninitialised bytes: uint8 [num_bytes]. They begin on a cache line; from 2 MiB on, on a large page.

    What does not fill a large page is in small ones: half of one more for every weight would be much of a small model.
    """
    if num_bytes < _LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        memory = torch.empty(num_bytes + CACHE_LINE, dtype=torch.uint8)
        start = -memory.data_ptr() % CACHE_LINE
        return memory[start : start + num_bytes]
    region = mmap.mmap(-1, num_bytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The tensor keeps the region, and the region goes with its last view.
    memory = torch.frombuffer(region, dtype=torch.uint8)
    start = -memory.data_ptr() % _LARGE_PAGE
    with suppress(OSError):  # a kernel without large pages: the memory is good all the same
        region.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // _LARGE_PAGE * _LARGE_PAGE)
    return memory[start : start + num_bytes]
