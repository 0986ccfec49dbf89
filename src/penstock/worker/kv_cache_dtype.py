"""Choice of the KV cache's dtype."""

from __future__ import annotations

import torch
from torch import nn

from penstock.attention.cpu_native import CpuNativeBackend, bfloat16_layout
from penstock.models.attention_layers import attention_layers


def choose_kv_cache_dtype(requested: str, model_dtype: str, model: nn.Module, backend: str | None) -> str:
    """Resolve the KV cache dtype by name: "auto" is bfloat16 for attention in bfloat16 arithmetic, else `model_dtype`.

    model: with its weights packed, which choose the arithmetic. backend: attention backend that was asked for by name.
    """
    if requested != "auto":
        return requested
    takes_bfloat16 = backend in (None, CpuNativeBackend.name) and attends_in_bfloat16(model)
    return "bfloat16" if takes_bfloat16 else model_dtype


def attends_in_bfloat16(model: nn.Module) -> bool:
    """Whether all attention layers can read a bfloat16 KV cache in bfloat16 arithmetic."""
    layers = attention_layers(model).values()
    return bool(layers) and all(bfloat16_layout(layer, torch.bfloat16) is not None for layer in layers)
