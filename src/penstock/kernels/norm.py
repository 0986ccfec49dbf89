"""RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

Statistics are computed in float32. Models differ in whether normalised values are rounded to the input's dtype before
or after the product with the weight. Suffixes: T tokens, D the normalised dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.native import NATIVE
from penstock.kernels.native.operations import can_be_added
from penstock.kernels.triton import triton_runs


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype; rounds before the product.

    x_TD:     [..., D], any strides.
    weight_D: [D], or anything that broadcasts against x, such as [H, D] for a weight per head.
    """
    if NATIVE is not None and NATIVE.runs(x_TD) and _native_takes(x_TD, weight_D):
        return NATIVE.rms_norm(x_TD, weight_D, eps)
    if (triton_rms_norm := _triton_kernel(x_TD, weight_D)) is not None:
        return triton_rms_norm(x_TD, weight_D, eps)
    return rms_norm_reference(x_TD, weight_D, eps)


def leading_rms_norm(rows_TX: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`rms_norm` of the first elements of contiguous rows: [T, D] from [T, D or more]."""
    if NATIVE is not None and NATIVE.runs(rows_TX) and weight_D.dtype is torch.float32:
        return NATIVE.rms_norm(rows_TX, weight_D, eps)
    return rms_norm(rows_TX[:, : weight_D.shape[0]], weight_D, eps)


def grouped_rms_norm(x_TX: Tensor, weight_GD: Tensor, eps: float) -> Tensor:
    """`rms_norm` of adjacent groups of features, with a weight for each: [T, G * D]."""
    if NATIVE is not None and NATIVE.runs(x_TX) and weight_GD.dtype is torch.float32 and x_TX.is_contiguous():
        return NATIVE.grouped_rms_norm(x_TX, weight_GD, eps)
    return rms_norm(x_TX.unflatten(1, weight_GD.shape), weight_GD, eps).flatten(1)


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The specification of `rms_norm`."""
    wide_TD = x_TD.to(torch.float32)
    scale_T1 = (wide_TD * wide_TD).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide_TD * scale_T1).to(x_TD.dtype).mul_(weight_D)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum: (normalised, new residual).

    Overwrites x with the new residual; `residual_TD` is not changed, since it may be the caller's input.
    """
    if NATIVE is not None and NATIVE.runs(x_TD) and x_TD.is_contiguous() and can_be_added(x_TD, residual_TD):
        return NATIVE.rms_norm(x_TD, weight_D, eps, residual_TD), x_TD
    if (triton_rms_norm := _triton_kernel(x_TD, weight_D, residual_TD)) is not None:
        return triton_rms_norm(x_TD, weight_D, eps, residual=residual_TD), x_TD
    residual_TD = x_TD.add_(residual_TD)
    return rms_norm(residual_TD, weight_D, eps), residual_TD


def rms_norm_rounded_last(x_TD: Tensor, weight_D: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight_offset + weight), in float32, then rounded to x's dtype.

    Arguments as in `rms_norm`, to which it is equal in float32 without an offset.
    """
    if x_TD.dtype is torch.float32:
        return rms_norm(x_TD, _shifted(weight_D, weight_offset), eps)
    if (triton_rms_norm := _triton_kernel(x_TD, weight_D)) is not None:
        return triton_rms_norm(x_TD, weight_D, eps, weight_offset=weight_offset, rounds_last=True)
    return rms_norm_rounded_last_reference(x_TD, weight_D, eps, weight_offset)


def rms_norm_rounded_last_reference(x_TD: Tensor, weight_D: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """The specification of `rms_norm_rounded_last`."""
    wide_TD = x_TD.to(torch.float32)
    scale_T1 = (wide_TD * wide_TD).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide_TD * scale_T1).mul_(_shifted(weight_D.to(torch.float32), weight_offset)).to(x_TD.dtype)


def add_rms_norm_rounded_last(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` with the norm of `rms_norm_rounded_last`."""
    if x_TD.dtype is torch.float32:
        return add_rms_norm(x_TD, residual_TD, _shifted(weight_D, weight_offset), eps)
    if (triton_rms_norm := _triton_kernel(x_TD, weight_D, residual_TD)) is not None:
        normed_TD = triton_rms_norm(
            x_TD, weight_D, eps, residual=residual_TD, weight_offset=weight_offset, rounds_last=True
        )
        return normed_TD, x_TD
    residual_TD = x_TD.add_(residual_TD)
    return rms_norm_rounded_last(residual_TD, weight_D, eps, weight_offset), residual_TD


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension (Ba, Kiros and Hinton 2016)."""
    if NATIVE is not None and NATIVE.runs(x_TD) and x_TD.dim() == 2 and x_TD.stride(1) == 1:
        return NATIVE.layer_norm(x_TD, weight_D, bias_D, eps)
    return layer_norm_reference(x_TD, weight_D, bias_D, eps)


def layer_norm_reference(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """The specification of `layer_norm`."""
    return F.layer_norm(x_TD, weight_D.shape, weight_D, bias_D, eps)


def add_layer_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add the residual to x, in place, and normalise the sum: (normalised, sum)."""
    if NATIVE is not None and NATIVE.runs(x_TD) and x_TD.is_contiguous() and can_be_added(x_TD, residual_TD):
        return NATIVE.layer_norm(x_TD, weight_D, bias_D, eps, residual_TD), x_TD
    residual_TD = x_TD.add_(residual_TD)
    return layer_norm(residual_TD, weight_D, bias_D, eps), residual_TD


def _triton_kernel(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Callable[..., Tensor] | None:
    """`kernels.triton.norm.rms_norm` if it takes these tensors."""
    if not triton_runs(x):
        return None
    from penstock.kernels.triton.norm import rms_norm, takes

    return rms_norm if takes(x, weight, residual) else None


def _shifted(weight_D: Tensor, offset: float) -> Tensor:
    return weight_D if offset == 0 else weight_D + offset


def _native_takes(x: Tensor, weight: Tensor) -> bool:
    """Whether rows, and heads within a row, are contiguous, and the weight is one for all or one per head."""
    if x.dim() == 2:
        return x.stride(1) == 1 and weight.dim() == 1
    return x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2] and weight.is_contiguous()
