"""Mixtures of gated MLPs over the tokens of a step, as grouped products on a GPU.

Suffixes: T tokens, D hidden size, I intermediate size, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.activation import (
    ClampedSwiglu,
    GatedActivation,
    gelu_and_mul,
    gelu_tanh_and_mul,
    silu_and_mul,
)
from penstock.kernels.stored_weight import PLAIN, ExpertWeights
from penstock.kernels.triton import triton_runs

_NAMES: dict[Any, str] = {silu_and_mul: "silu", gelu_and_mul: "gelu", gelu_tanh_and_mul: "gelu_tanh"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def mixture_reference(
    hidden_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    activation: GatedActivation,
    gate_up_bias: Sequence[Tensor] | None = None,
    down_bias: Sequence[Tensor] | None = None,
) -> Tensor:
    """Weighted sum of each token's experts, in the order of K, in float32, rounded to the hidden states' dtype.

    The weights are those of `ExpertWeights`, dequantised.
    """
    sum_TD = torch.zeros_like(hidden_TD, dtype=torch.float32)
    for token, (chosen, weights) in enumerate(zip(experts_TK.tolist(), weights_TK.float(), strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            biases = [None if of is None else of[expert].float() for of in (gate_up_bias, down_bias)]
            given = F.linear(hidden_TD[token : token + 1].float(), gate_up[expert].float(), biases[0])
            made = F.linear(activation(given), down[expert].float(), biases[1])
            sum_TD[token] += weight * made[0]
    return sum_TD.to(hidden_TD.dtype)


class GroupedExperts:
    """Mixture of experts in Triton, for the weights that it was made with, which it does not keep."""

    def __init__(self, experts: ExpertWeights, activation: GatedActivation, *, is_invariant: bool) -> None:
        from penstock.kernels.triton.experts import ExpertTable

        self._table = ExpertTable(experts)
        if isinstance(activation, ClampedSwiglu):
            self._activation = "clamped_swiglu", activation.alpha, activation.limit
        else:
            self._activation = _NAMES[activation], 0.0, 0.0
        self._is_invariant = is_invariant

    @staticmethod
    def runs(hidden_TD: Tensor, activation: GatedActivation) -> bool:
        """Whether Triton runs for these hidden states and this activation."""
        is_known = isinstance(activation, ClampedSwiglu) or activation in _NAMES
        return is_known and hidden_TD.dtype in _DTYPES and triton_runs(hidden_TD)

    @staticmethod
    def takes(experts: ExpertWeights, dtype: torch.dtype) -> bool:
        """Whether one launch can multiply all of these weights: they have one layout, and floats are of this dtype."""
        biases = [*(experts.gate_up_bias or ()), *(experts.down_bias or ())]
        return (
            all(len({weight.layout for weight in weights}) == 1 for weights in (experts.gate_up, experts.down))
            and all(one.form != PLAIN or one.values.dtype is dtype for one in (experts.gate_up[0], experts.down[0]))
            and all(bias.dtype is dtype for bias in biases)
        )

    def mixture(self, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """As `mixture_reference`, with products rounded to the dtype of the hidden states."""
        from penstock.kernels.triton.experts import mixture

        activation = self._activation
        return mixture(hidden_TD, experts_TK, weights_TK, self._table, activation, is_invariant=self._is_invariant)
