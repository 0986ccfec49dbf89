"""Activation functions of gated feed-forward networks (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.native import NATIVE


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) * up, where the last dimension holds gate, then up: [T, 2 * I] to [T, I]."""
    if NATIVE is not None and NATIVE.runs(gate_up_TI) and gate_up_TI.is_contiguous():
        return NATIVE.silu_and_mul(gate_up_TI)
    return silu_and_mul_reference(gate_up_TI)


def silu_and_mul_reference(gate_up_TI: Tensor) -> Tensor:
    """The specification of `silu_and_mul`."""
    gate_TI, up_TI = gate_up_TI.chunk(2, -1)
    return F.silu(gate_TI).mul_(up_TI)
