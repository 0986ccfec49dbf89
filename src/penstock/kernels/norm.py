"""Root mean square normalisation (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

Statistics are computed in float32; the normalised values are rounded to the input's dtype before they meet the
weight, as the models were trained. Suffixes: T tokens, D the normalised dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype.

    x_TD:     [..., D], any strides.
    weight_D: [D], or anything that broadcasts against x, such as [H, D] for heads with weights of their own.
    """
    wide_TD = x_TD.to(torch.float32)
    scale_T1 = (wide_TD * wide_TD).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide_TD * scale_T1).to(x_TD.dtype).mul_(weight_D)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x to the residual stream and normalises the sum: (normalised, new residual).

    Overwrites x, which becomes the new residual; `residual_TD` is left as it is, since it may be the caller's input.
    """
    residual_TD = x_TD.add_(residual_TD)
    return rms_norm(residual_TD, weight_D, eps), residual_TD
