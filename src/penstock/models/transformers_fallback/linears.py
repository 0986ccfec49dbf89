"""The linear layers of a wrapped model multiply as all others here do."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from penstock.layers.linear import LinearLayer
from penstock.parallel import ParallelContext


def replace_linears(model: nn.Module, parallel: ParallelContext) -> None:
    """Put a `LinearLayer` with the same parameters in place of every `nn.Linear`; subclasses stay as they are."""
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, _linear_layer(child, parallel, shares_weight=owners[id(child.weight)] > 1))


def _linear_layer(linear: nn.Linear, parallel: ParallelContext, *, shares_weight: bool) -> LinearLayer:
    with torch.device("meta"):
        layer = LinearLayer(linear.in_features, linear.out_features, bias=linear.bias is not None, parallel=parallel)
    parameters = dict(linear.named_parameters())
    layer.weight, layer.bias = parameters["weight"], parameters.get("bias")
    layer.shares_weight = shares_weight
    return layer
