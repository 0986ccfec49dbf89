"""Zeroed memory mapped from the system, in huge pages where available.

The heap caches freed memory (`host_allocator`) and would zero it by writing, which populates all pages at once.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

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
