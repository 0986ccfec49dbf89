"""Layouts of the C++ kernels for products in bfloat16 arithmetic."""

from __future__ import annotations

from enum import Enum

import torch


class Bfloat16Layout(Enum):
    """Layout of a weight for bfloat16 arithmetic, which decides the order of sums, in attention too.

    Values: the library's number of weights, and of KV caches, in this arithmetic, and dtype of the packed weight, whose
    elements are two adjacent input features.
    PAIRS: for AVX512-BF16. TILES: for AMX; inputs are padded to a multiple of 32 in memory.
    """

    PAIRS = 3, torch.int32
    TILES = 4, torch.uint32
