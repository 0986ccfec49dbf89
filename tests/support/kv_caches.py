"""KV caches of the C++ attention kernels: dtypes, and the arithmetic of attention over them."""

from __future__ import annotations

import torch

from penstock.kernels.native import Bfloat16Layout

# dtype in memory, and the order of products in bfloat16 arithmetic, None for others.
KV_CACHES: dict[str, tuple[torch.dtype, Bfloat16Layout | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.int8, None),
    "bfloat16-by-pairs": (torch.bfloat16, Bfloat16Layout.PAIRS),
    "bfloat16-by-tiles": (torch.bfloat16, Bfloat16Layout.TILES),
}
