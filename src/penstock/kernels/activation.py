"""Activation functions of feed-forward networks, plain and gated (Shazeer 2020, https://arxiv.org/abs/2002.05202).

A gated one takes gate and up projections side by side, [T, 2 * I] with the gate first, and returns
activation(gate) * up: [T, I].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.native import NATIVE
from penstock.kernels.triton import triton_runs

_QUICK_GELU = 1.702


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) * up."""
    if NATIVE is not None and NATIVE.runs(gate_up_TI) and gate_up_TI.is_contiguous():
        return NATIVE.gate_and_mul("silu", gate_up_TI)
    if _triton_takes(gate_up_TI):
        return _triton_gate_and_mul("silu", gate_up_TI)
    return silu_and_mul_reference(gate_up_TI)


def silu_and_mul_reference(gate_up_TI: Tensor) -> Tensor:
    """The specification of `silu_and_mul`."""
    gate_TI, up_TI = gate_up_TI.chunk(2, -1)
    return F.silu(gate_TI).mul_(up_TI)


def gelu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """gelu(gate) * up, with the exact gelu."""
    if NATIVE is not None and NATIVE.runs(gate_up_TI) and gate_up_TI.is_contiguous():
        return NATIVE.gate_and_mul("gelu", gate_up_TI)
    if _triton_takes(gate_up_TI):
        return _triton_gate_and_mul("gelu", gate_up_TI)
    return gelu_and_mul_reference(gate_up_TI)


def gelu_and_mul_reference(gate_up_TI: Tensor) -> Tensor:
    """The specification of `gelu_and_mul`."""
    gate_TI, up_TI = gate_up_TI.chunk(2, -1)
    return F.gelu(gate_TI).mul_(up_TI)


def gelu_tanh_and_mul(gate_up_TI: Tensor) -> Tensor:
    """gelu(gate) * up, with gelu's approximation by tanh."""
    if NATIVE is not None and NATIVE.runs(gate_up_TI) and gate_up_TI.is_contiguous():
        return NATIVE.gate_and_mul("gelu_tanh", gate_up_TI)
    if _triton_takes(gate_up_TI):
        return _triton_gate_and_mul("gelu_tanh", gate_up_TI)
    return gelu_tanh_and_mul_reference(gate_up_TI)


def gelu_tanh_and_mul_reference(gate_up_TI: Tensor) -> Tensor:
    """The specification of `gelu_tanh_and_mul`."""
    gate_TI, up_TI = gate_up_TI.chunk(2, -1)
    return gelu_tanh_reference(gate_TI).mul_(up_TI)


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """gate * sigmoid(alpha * gate) * (up + 1), of gates up to `limit` and ups between -limit and limit (gpt-oss)."""

    alpha: float
    limit: float

    def __call__(self, gate_up_TI: Tensor) -> Tensor:
        if NATIVE is not None and NATIVE.runs(gate_up_TI) and gate_up_TI.is_contiguous():
            return NATIVE.clamped_swiglu(gate_up_TI, self.alpha, self.limit)
        if _triton_takes(gate_up_TI):
            from penstock.kernels.triton.activation import clamped_swiglu

            return clamped_swiglu(gate_up_TI, self.alpha, self.limit)
        return self.reference(gate_up_TI)

    def reference(self, gate_up_TI: Tensor) -> Tensor:
        """The specification."""
        gate_TI, up_TI = gate_up_TI.chunk(2, -1)
        gate_TI, up_TI = gate_TI.clamp(max=self.limit), up_TI.clamp(-self.limit, self.limit)
        return gate_TI * torch.sigmoid(gate_TI * self.alpha) * (up_TI + 1)


def _triton_takes(gate_up_TI: Tensor) -> bool:
    return gate_up_TI.dim() == 2 and gate_up_TI.stride(1) == 1 and triton_runs(gate_up_TI)


def _triton_gate_and_mul(activation: str, gate_up_TI: Tensor) -> Tensor:
    from penstock.kernels.triton.activation import gate_and_mul

    return gate_and_mul(activation, gate_up_TI)


def gelu_tanh(x: Tensor) -> Tensor:
    """gelu's approximation by tanh (Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415)."""
    return NATIVE.activate("gelu_tanh", x) if NATIVE is not None and _native_takes(x) else gelu_tanh_reference(x)


def gelu_tanh_reference(x: Tensor) -> Tensor:
    """The specification of `gelu_tanh`."""
    return F.gelu(x, approximate="tanh")


def gelu(x: Tensor) -> Tensor:
    """x times the standard normal distribution's integral up to x, within 2e-7 of it times x."""
    return NATIVE.activate("gelu", x) if NATIVE is not None and _native_takes(x) else F.gelu(x)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return NATIVE.activate("silu", x) if NATIVE is not None and _native_takes(x) else F.silu(x)


def sigmoid(x: Tensor) -> Tensor:
    """Sigmoid of each element, the same bits wherever the element lies; those of `torch.sigmoid` depend on that."""
    return torch.softmax(torch.stack((x, torch.zeros_like(x)), -1), -1)[..., 0]


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return NATIVE.activate("relu", x) if NATIVE is not None and _native_takes(x) else F.relu(x)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0) ** 2 (So et al. 2021, https://arxiv.org/abs/2109.08668)."""
    return NATIVE.activate("relu2", x) if NATIVE is not None and _native_takes(x) else F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """gelu's approximation x * sigmoid(1.702 * x) (Hendrycks and Gimpel 2016). A program cannot record it."""
    return silu(x * _QUICK_GELU).mul_(1 / _QUICK_GELU)


def _native_takes(x: Tensor) -> bool:
    return NATIVE is not None and NATIVE.runs(x) and x.dim() == 2 and x.is_contiguous()


Activation = Callable[[Tensor], Tensor]
# By the names that `config.json` has for them.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": silu,
    "swish": silu,
    "relu": relu,
    "relu2": squared_relu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}
GatedActivation = Callable[[Tensor], Tensor]
GATED_ACTIVATIONS: Mapping[str, GatedActivation] = {
    "silu": silu_and_mul,
    "swish": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_new": gelu_tanh_and_mul,
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
}
