"""Memory in huge pages where the system has them: KV caches, and packed weights.

The heap caches freed memory (`host_allocator`) and would zero it by writing, which populates all pages at once. A
product streams its whole weight: with 4 KiB pages the CPU's prefetchers stop at page ends, and TLB misses cost time, up
to a third.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from penstock.device.stand_in import stands_for_cpu

# Huge page size of Linux on x86-64, and on Arm with 4 KiB pages.
LARGE_PAGE = 2 << 20
HAS_LARGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


def fresh_memory(num_bytes: int) -> Tensor:
    """Map zeros whose pages are populated on first use: uint8 [num_bytes], aligned to a huge page.

    The remainder is in small pages. Needs HAS_LARGE_PAGES.
    """
    region = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The tensor keeps the mapping alive, and unmaps it with its last view.
    memory = torch.frombuffer(region, dtype=torch.uint8)
    start = -memory.data_ptr() % LARGE_PAGE
    with suppress(OSError):  # no huge page support: the memory is usable all the same
        region.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // LARGE_PAGE * LARGE_PAGE)
    return memory[start : start + num_bytes]


CACHE_LINE = 64


def weight_memory(num_bytes: int) -> Tensor:
    """Allocate uninitialised bytes: uint8 [num_bytes], aligned to a cache line; from 2 MiB on, to a huge page.

    The remainder is in small pages: rounding up would waste half a huge page per weight.
    """
    if stands_for_cpu():
        return torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes >= LARGE_PAGE and HAS_LARGE_PAGES:
        return fresh_memory(num_bytes)
    memory = torch.empty(num_bytes + CACHE_LINE, dtype=torch.uint8)
    start = -memory.data_ptr() % CACHE_LINE
    return memory[start : start + num_bytes]
