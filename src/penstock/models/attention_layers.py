"""KV cache requirements of a model's layers, for the memory plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn

from penstock.attention import CacheLayer, LayerAttention
from penstock.contract import KVCacheSpec
from penstock.layers.attention import Attention
from penstock.layers.linear import has_bfloat16_products
from penstock.layers.recurrence.state import RecurrentState


@runtime_checkable
class KeepsCache(Protocol):
    """A module with state between steps: attention, or another layer with pages.

    layer: its description, and its name in the KV cache (`attention.CacheLayer`).
    """

    layer: CacheLayer

    def get_kv_cache_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        """KV cache spec of the layer. block_size: positions per block, for per-position state.

        dtype: requested, by name.
        """


def cache_layers(model: nn.Module) -> dict[str, CacheLayer]:
    """Layers that the runner binds to a backend by name, in execution order: those with pages in the KV cache, and
    attention that is not causal, which has none. A model may have none.
    """
    return {module.layer.name: module.layer for module in _modules(model)}


def prefix_layers(model: nn.Module, prefix: str) -> None:
    """Prefix the names of a model's layers, where two models share a KV cache."""
    for module in _modules(model):
        layer: Any = module.layer
        module.layer = dataclasses.replace(layer, name=prefix + layer.name)


def choose_attention_arithmetic(model: nn.Module) -> None:
    """Give attention the arithmetic of the model's matrix products, before the layers' backends are made."""
    arithmetic = "bfloat16" if has_bfloat16_products(model) else "float32"
    for module in _modules(model):
        if isinstance(module.layer, LayerAttention):
            module.layer = dataclasses.replace(module.layer, cpu_arithmetic=arithmetic)


def modules_of_attention(model: nn.Module) -> dict[int, Attention]:
    """Attention modules by the id of each module beside them, such as the projections of queries, keys and values."""
    return {
        id(neighbour): module
        for parent in model.modules()
        for module in parent.children()
        if isinstance(module, Attention)
        for neighbour in parent.children()
    }


def attend_in_both_directions(model: nn.Module) -> None:
    """Make a decoder's attention layers see all of a text, as an encoder's."""
    for module in _modules(model):
        if isinstance(module.layer, LayerAttention):
            module.layer = dataclasses.replace(module.layer, is_causal=False)


def attention_layers(model: nn.Module) -> dict[str, LayerAttention]:
    """Attention layers over a KV cache by name, in execution order."""
    layers = cache_layers(model).items()
    return {name: layer for name, layer in layers if isinstance(layer, LayerAttention) and layer.is_causal}


def most_query_heads(layers: Mapping[str, CacheLayer]) -> int:
    """The largest number of query heads of an attention layer; 0 without attention layers."""
    return max((layer.num_heads for layer in layers.values() if isinstance(layer, LayerAttention)), default=0)


def choose_state_dtypes(model: nn.Module, convolution: str, scan: str) -> None:
    """Choose the dtypes of what recurrent layers keep, by name, before the layers' specs are made."""
    for module in _modules(model):
        if isinstance(module.layer, RecurrentState):
            module.layer = dataclasses.replace(module.layer, convolution_dtype=convolution, scan_dtype=scan)


def kv_cache_specs(model: nn.Module, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
    """KV cache specs by layer name. dtype: of the cache, by name."""
    return {
        module.layer.name: module.get_kv_cache_spec(block_size, dtype)
        for module in _modules(model)
        if not isinstance(module.layer, LayerAttention) or module.layer.is_causal
    }


def _modules(model: nn.Module) -> list[KeepsCache]:
    return [module for module in model.modules() if isinstance(module, KeepsCache)]
