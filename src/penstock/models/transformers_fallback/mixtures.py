"""Replacement of a wrapped model's mixtures of experts by the library's.

The experts of Transformers hold the weights of all in one parameter and take their products from an interface. Here
each expert's projections are linear layers, whose rows do not depend on each other; the router stays the model's own.

Suffixes: T tokens, D hidden size, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from penstock.kernels.activation import GATED_ACTIVATIONS, GatedActivation
from penstock.layers.experts import Experts
from penstock.layers.mlp import GatedMLP
from penstock.models.transformers_fallback.interface import ContextSlot
from penstock.parallel import ParallelState

# The name of these experts in the interface, and of the library's in a module of Transformers.
_IMPLEMENTATION = "penstock"
_EXPERTS = "penstock_experts"
_STACKED = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts in place of those of a module.

    name: of the module. is_transposed: whether its parameters are of [inputs, outputs].
    """

    name: str
    experts: Experts
    has_bias: bool
    is_transposed: bool

    def parameters(self) -> Iterator[tuple[str, Sequence[Tensor]]]:
        """Stacked parameters by name in the complete model, each as the tensors of its experts, in its own shape."""
        for projection in ("gate_up_proj", "down_proj"):
            layers = [getattr(cast("GatedMLP", mlp), projection) for mlp in self.experts]
            weights = [layer.weight.t() if self.is_transposed else layer.weight for layer in layers]
            yield f"{self.name}.{projection}", weights
            if self.has_bias:
                yield f"{self.name}.{projection}_bias", [layer.bias for layer in layers]


class SlotExperts(Experts):
    """Experts of a module without a context argument, which read it from their model's slot."""

    slot: ContextSlot

    def forward(self, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.partial(hidden_TD, experts_TK, weights_TK, self.slot.context)


def replace_experts(model: PreTrainedModel, slot: ContextSlot, parallel: ParallelState) -> list[Mixture]:
    """Replace the experts that take their products from the interface."""
    mixtures = []
    for name, module in list(model.named_modules()):
        if not _takes_products(module):
            continue
        experts = _experts_like(module, parallel)
        experts.slot = slot
        mixtures.append(Mixture(name, experts, module.has_bias, module.is_transposed))
        for parameter in _STACKED:
            if hasattr(module, parameter):
                delattr(module, parameter)
        setattr(module, _EXPERTS, experts)
        module.config._experts_implementation = _IMPLEMENTATION
    return mixtures


def is_of_experts(name: str) -> bool:
    """Whether the module of this name is inside of experts that were put in place."""
    return f".{_EXPERTS}." in f".{name}."


def _takes_products(module: Any) -> TypeGuard[Any]:
    """Whether it is a module of gated experts of the interface, without a norm on their outputs."""
    is_gated = getattr(module, "has_gate", False) is True and getattr(module, "has_post_expert_norm", None) is False
    return is_gated and all(isinstance(getattr(module, name, None), nn.Parameter) for name in _STACKED[:2])


def _experts_like(module: Any, parallel: ParallelState) -> SlotExperts:
    num_experts, *sizes = module.gate_up_proj.shape
    hidden_size = sizes[0] if module.is_transposed else sizes[1]
    return SlotExperts(
        num_experts,
        hidden_size,
        (sizes[1] if module.is_transposed else sizes[0]) // 2,
        activation=_activation(module),
        parallel=parallel,
        bias=module.has_bias,
    )


def _activation(module: Any) -> str | GatedActivation:
    """A name in `GATED_ACTIVATIONS` if the gate is a plain one, else the module's own."""
    is_plain = module.is_concatenated and type(module)._apply_gate.__module__ == "transformers.integrations.moe"
    for name in GATED_ACTIVATIONS if is_plain else ():
        if type(ACT2FN[name]) is type(module.act_fn):
            return name
    return cast("GatedActivation", module._apply_gate)


def _experts_forward(module: nn.Module, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    return getattr(module, _EXPERTS)(hidden_TD, experts_TK, weights_TK)  # type: ignore[no-any-return]


ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _experts_forward)
