"""Tensors that have sizes and no memory, on torch's meta device, in the place of another device's.

What is done with them shows what it would take, and costs nothing. Whoever asks where a tensor is, is told what it
stands for; and the C++ kernels, for which there are no addresses then, are not called (`kernels.native.library`).
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
    """kind: of the device whose place this thread's tensors take; None where they are what they are."""

    kind: str | None = None


_here = _Here()


def is_on_cpu(tensor: Tensor) -> bool:
    """Whether this tensor is on the CPU, or stands for one that is."""
    return tensor.is_cpu or _here.kind == "cpu"


def stands_for_cpu() -> bool:
    """Whether the tensors that are made now have no memory, and stand for a CPU's."""
    return _here.kind == "cpu"


def host_array(tensor: Tensor) -> np.ndarray:
    """Array on the memory of a tensor of the CPU; read-only zeros without memory where the tensor has none."""
    if not tensor.is_meta:
        return tensor.numpy()
    dtype = torch.empty(0, dtype=tensor.dtype, device="cpu").numpy().dtype
    return np.broadcast_to(np.zeros((), dtype), tuple(tensor.shape))


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Make all tensors without memory, in this thread, and let them stand for those of a kind of device."""
    before, _here.kind = _here.kind, kind
    try:
        with torch.no_grad(), META, KnownSizes(), SizesOfOperators():  # type: ignore[no-untyped-call]
            yield
    finally:
        _here.kind = before
