"""Memory for packed weights, in large pages where the system has them.

A product reads its whole weight in order. With pages of 4 KiB the processor's prefetchers stop at the end of each, and
looking up the next one's place in memory costs time: streaming a weight is up to a third slower than with large pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.device.fresh_memory import HAS_LARGE_PAGES, LARGE_PAGE, fresh_memory
from penstock.device.stand_in import stands_for_cpu

CACHE_LINE = 64


def weight_memory(num_bytes: int) -> Tensor:
    """Uninitialised bytes: uint8 [num_bytes]. They begin on a cache line; from 2 MiB on, on a large page.

    What does not fill a large page is in small ones: half of one more for every weight would be much of a small model.
    """
    if stands_for_cpu():
        return torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes >= LARGE_PAGE and HAS_LARGE_PAGES:
        return fresh_memory(num_bytes)
    memory = torch.empty(num_bytes + CACHE_LINE, dtype=torch.uint8)
    start = -memory.data_ptr() % CACHE_LINE
    return memory[start : start + num_bytes]
