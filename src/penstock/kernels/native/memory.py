"""Memory of packed weights, in huge pages where the system has them.

A product streams its whole weight. With 4 KiB pages the CPU's prefetchers stop at page ends, and TLB misses cost time:
streaming is up to a third slower than with huge pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.device.fresh_memory import HAS_LARGE_PAGES, LARGE_PAGE, fresh_memory
from penstock.device.stand_in import stands_for_cpu

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
