"""What a model's layers compute and keep, for whoever plans its cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn

from penstock.attention import CacheLayer, LayerAttention
from penstock.contract import KVCacheSpec


@runtime_checkable
class KeepsCache(Protocol):
    """A module that keeps something between steps: attention, or anything else that has pages.

    layer: its name among those layers, and what it is bound with (`attention.CacheLayer`).
    """

    layer: CacheLayer

    def get_kv_cache_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        """What it keeps per block. block_size: positions, where it keeps something for each. dtype: wanted, by name."""


def cache_layers(model: nn.Module) -> dict[str, CacheLayer]:
    """Each layer that keeps something, by name, in the order in which they run. A model may have none."""
    return {module.layer.name: module.layer for module in _modules(model)}


def prefix_layers(model: nn.Module, prefix: str) -> None:
    """Begin the names of its layers so, where another model's are kept beside them."""
    for module in _modules(model):
        layer: Any = module.layer
        module.layer = dataclasses.replace(layer, name=prefix + layer.name)


def attention_layers(model: nn.Module) -> dict[str, LayerAttention]:
    """What each attention layer computes, by layer name, in the order in which they run."""
    return {name: layer for name, layer in cache_layers(model).items() if isinstance(layer, LayerAttention)}


def most_query_heads(layers: Mapping[str, CacheLayer]) -> int:
    """Of the attention layer that has the most; 0 where there is none."""
    return max((layer.num_heads for layer in layers.values() if isinstance(layer, LayerAttention)), default=0)


def kv_cache_specs(model: nn.Module, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
    """What each of those layers keeps, by layer name. dtype: of the cache, by name."""
    return {module.layer.name: module.get_kv_cache_spec(block_size, dtype) for module in _modules(model)}


def _modules(model: nn.Module) -> list[KeepsCache]:
    return [module for module in model.modules() if isinstance(module, KeepsCache)]
