"""Meta tensors that stand in for tensors of another device, for planning without memory.

A meta tensor reports the device that it stands for; the C++ kernels, which need addresses, are not called
(`kernels.native.library`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from penstock.device.operator_sizes import META, KnownSizes, SizesOfOperators


class _Here(threading.local):
    """kind: device kind that this thread's meta tensors stand for; None for none."""

    kind: str | None = None


_here = _Here()


def is_on_cpu(tensor: Tensor) -> bool:
    """Whether this tensor is on the CPU, or stands for one that is."""
    return tensor.is_cpu or _here.kind == "cpu"


def stands_for_cpu() -> bool:
    """Whether new tensors are meta tensors that stand for the CPU's."""
    return _here.kind == "cpu"


def host_array(tensor: Tensor) -> np.ndarray:
    """View a CPU tensor as an array; read-only zeros without memory for a meta tensor."""
    if not tensor.is_meta:
        return tensor.numpy()
    dtype = torch.empty(0, dtype=tensor.dtype, device="cpu").numpy().dtype
    return np.broadcast_to(np.zeros((), dtype), tuple(tensor.shape))


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Create all tensors of this thread on the meta device, standing for a kind of device."""
    before, _here.kind = _here.kind, kind
    try:
        with torch.no_grad(), META, KnownSizes(), SizesOfOperators():  # type: ignore[no-untyped-call]
            yield
    finally:
        _here.kind = before
