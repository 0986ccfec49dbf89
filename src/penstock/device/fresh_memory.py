"""Memory that comes from the system, not from the heap, in large pages where it has them.

The heap keeps what is freed (`host_allocator`), and would give zeros from there by writing them: all their pages would
be taken at once.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

# What Linux has on x86-64, and with 4 KiB pages on Arm.
LARGE_PAGE = 2 << 20
HAS_LARGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


def fresh_memory(num_bytes: int) -> Tensor:
    """Zeros, of which the system hands out pages on first use: uint8 [num_bytes], beginning on a large page.

    What does not fill a large page is in small ones. Needs HAS_LARGE_PAGES.
    """
    region = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The tensor keeps the region, and the region goes with its last view.
    memory = torch.frombuffer(region, dtype=torch.uint8)
    start = -memory.data_ptr() % LARGE_PAGE
    with suppress(OSError):  # a kernel without large pages: the memory is good all the same
        region.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // LARGE_PAGE * LARGE_PAGE)
    return memory[start : start + num_bytes]
