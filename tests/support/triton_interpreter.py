"""Repairs of Triton's interpreter (3.6), which tests of kernels with loops and matrix products import."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor
_create_dot = interpreter.InterpreterBuilder.create_dot
_convert_float = interpreter._convert_float


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Bounds of loops: Triton converts arrays of one element by int(), which NumPy refuses since 2.4."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """Products of bfloat16: Triton would multiply their bits as integers."""
    return _create_dot(self, _widened(a), _widened(b), d, *options)


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar is not tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products be rounded from float64: the bits of BLAS's float32 products depend on a row's place in its tile."""

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        left, right = (_widened(handle).data.astype(np.float64) for handle in (a, b))
        total = np.matmul(left, right) + d.data
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def _rounded(data: np.ndarray, source: Any, target: Any, rounding: Any) -> Any:
    """From float32 to the nearest bfloat16, which Triton would truncate, and FP8, where it would lose a carry."""
    if source == tl.float32 and target == tl.bfloat16:
        return torch.from_numpy(np.array(data)).to(torch.bfloat16).view(torch.uint16).numpy()
    if source == tl.float32 and target == tl.float8e4nv:
        return torch.from_numpy(np.array(data)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return _convert_float(data, source, target, rounding)


interpreter._convert_float = _rounded
interpreter._patch_lang_tensor = _patch_with_index
interpreter.InterpreterBuilder.create_dot = _dot
