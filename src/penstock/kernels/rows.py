"""Sums of rows, and rows side by side, which programs know too. Suffixes: T tokens, D hidden size."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.native.tracing import Kernel, TracedTensor


def sum_rows(x_TD: Tensor, residual_TD: Tensor | None) -> Tensor:
    """x + residual, or x where there is no residual: new [T, D]."""
    if isinstance(x_TD, TracedTensor):
        return x_TD.origin.add(Kernel.SUM, x_TD, x_TD.stride(0), residual=residual_TD)
    return x_TD.clone() if residual_TD is None else x_TD + residual_TD


def concatenate_rows(first_TD: Tensor, second_TD: Tensor) -> Tensor:
    """Side by side: [T, D of the first + D of the second]."""
    if isinstance(first_TD, TracedTensor):
        width = first_TD.stride(0) + second_TD.stride(0)
        return first_TD.origin.add(Kernel.CONCATENATE, first_TD, width, residual=second_TD)
    return torch.cat((first_TD, second_TD), dim=-1)
