"""Replacement of a wrapped model's linear layers by the library's."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from penstock.layers.embedding import VocabEmbedding
from penstock.layers.linear import LinearLayer
from penstock.models.transformers_fallback.interface import ContextSlot
from penstock.parallel import ParallelState

# Subclasses that compute the same.
_LINEARS = ("FalconLinear",)


class SlotLinear(LinearLayer):
    """A linear layer of a module without a context argument, which reads it from its model's slot."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool, slot: ContextSlot) -> None:
        super().__init__(input_size, output_size, bias=bias)
        self._slot = slot

    def forward(self, x_TI: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x_TI, self._slot.context)


class SlotEmbedding(VocabEmbedding):
    """An embedding of a module without a context argument, which reads it from its model's slot."""

    def __init__(self, vocab_size: int, hidden_size: int, *, parallel: ParallelState, slot: ContextSlot) -> None:
        super().__init__(vocab_size, hidden_size, parallel=parallel)
        self._slot = slot

    def forward(self, input_ids_T: Tensor) -> Tensor:  # type: ignore[override]
        # Modules of Transformers have a batch dimension, step inputs have none.
        return super().forward(input_ids_T, self._slot.context).view(*input_ids_T.shape, -1)


def replace_linears(model: nn.Module, slot: ContextSlot, parallel: ParallelState) -> None:
    """Replace every `nn.Linear` by a `SlotLinear` with the same parameters; subclasses stay as they are.

    A plain embedding is replaced too: its weight may then have a narrower dtype, and is shared with a tied linear
    layer.
    """
    owners: defaultdict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append(module)
    replacements: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear) and (type(module) is nn.Linear or type(module).__name__ in _LINEARS):
            replacements[module] = layer = _linear_layer(module, slot)
            others = [owner for owner in owners[id(module.weight)] if owner is not module]
            if len(others) == 1 and _only_looks_up(others[0]):
                replacements[others[0]] = embedding = _embedding(others[0], slot, parallel)
                layer.tied_to = (embedding,)
            else:
                layer.shares_weight = bool(others)
        elif _only_looks_up(module) and owners[id(module.weight)] == [module]:
            replacements[module] = _embedding(module, slot, parallel)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child in replacements:
                setattr(module, name, replacements[child])


def _only_looks_up(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None


def _linear_layer(linear: nn.Linear, slot: ContextSlot) -> LinearLayer:
    with torch.device("meta"):
        layer = SlotLinear(linear.in_features, linear.out_features, bias=linear.bias is not None, slot=slot)
    parameters = dict(linear.named_parameters())
    layer.weight, layer.bias = parameters["weight"], parameters.get("bias")
    return layer


def _embedding(embedding: nn.Module, slot: ContextSlot, parallel: ParallelState) -> VocabEmbedding:
    weight = embedding.get_parameter("weight")
    with torch.device("meta"):
        layer = SlotEmbedding(*weight.shape, parallel=parallel, slot=slot)
    layer.weight = weight
    return layer
