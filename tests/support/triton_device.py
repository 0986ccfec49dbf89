"""Device of the tests of Triton kernels: a GPU, or the CPU under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch

from penstock.system.env import interprets_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and not interprets_triton(), reason="needs a GPU, or TRITON_INTERPRET=1"
)
