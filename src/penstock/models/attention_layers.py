"""What a model's attention layers compute and store, for whoever plans its KV cache."""

from __future__ import annotations

from torch import nn

from penstock.attention import LayerAttention
from penstock.contract import KVCacheSpec
from penstock.layers.attention import Attention


def attention_layers(model: nn.Module) -> dict[str, LayerAttention]:
    """What each attention layer computes, by layer name, in the order in which they run."""
    return {layer.layer.name: layer.layer for layer in _layers(model)}


def kv_cache_specs(model: nn.Module, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
    """What each attention layer stores, by layer name. dtype: of the cache, by name."""
    return {layer.layer.name: layer.get_kv_cache_spec(block_size, dtype) for layer in _layers(model)}


def _layers(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]
