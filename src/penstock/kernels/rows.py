"""Sums, concatenations and columns of hidden states. Suffixes: T tokens, D hidden size."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.native import NATIVE
from penstock.kernels.native.operations import can_be_added


def sum_rows(x_TD: Tensor, residual_TD: Tensor | None) -> Tensor:
    """x + residual, or a copy of x without a residual: [T, D]."""
    adds = residual_TD is None or can_be_added(x_TD, residual_TD)
    if NATIVE is not None and NATIVE.runs(x_TD) and _are_contiguous(x_TD) and adds:
        return NATIVE.sum_rows(x_TD, residual_TD)
    return x_TD.clone() if residual_TD is None else x_TD + residual_TD


def concatenate_rows(first_TD: Tensor, second_TD: Tensor) -> Tensor:
    """Concatenate along the last dimension: [T, D of the first + D of the second]."""
    if NATIVE is not None and NATIVE.runs(first_TD) and _are_contiguous(first_TD, second_TD):
        return NATIVE.concatenate_rows(first_TD, second_TD)
    return torch.cat((first_TD, second_TD), dim=-1)


def columns(x_TD: Tensor, offset: int, width: int) -> Tensor:
    """Copy columns from `offset` on: contiguous, [T, width]."""
    if NATIVE is not None and NATIVE.runs(x_TD) and _are_contiguous(x_TD):
        return NATIVE.columns(x_TD, offset, width)
    return x_TD[:, offset : offset + width].contiguous()


def _are_contiguous(*rows: Tensor) -> bool:
    """Whether the native kernels take these rows."""
    return all(x.dtype is torch.float32 and x.dim() == 2 and x.is_contiguous() for x in rows)
