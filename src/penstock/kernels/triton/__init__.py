"""Triton kernels for tensors on a GPU.

The modules of this package import Triton, so they are imported where a tensor needs them: without Triton or a GPU they
never are. `TRITON_INTERPRET=1` lets Triton's interpreter run them on CPU tensors, for tests.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

from penstock.system.env import interprets_triton

_HAS_TRITON = find_spec("triton") is not None
_INTERPRETS = interprets_triton()


def has_triton() -> bool:
    """Whether Triton is installed."""
    return _HAS_TRITON


def triton_runs(x: Tensor) -> bool:
    """Whether Triton kernels take this tensor."""
    return _HAS_TRITON and (x.is_cuda or (_INTERPRETS and x.is_cpu))
