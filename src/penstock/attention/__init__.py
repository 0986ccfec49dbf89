"""Attention over a paged KV cache: one file per backend, behind one interface."""

from penstock.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    BringsBackend,
    CacheBackend,
    CacheLayer,
    HeadNorm,
    LayerAttention,
    SequenceGeometry,
    StepGeometry,
)
from penstock.attention.context import NO_INPUTS, BoundLayer, ForwardContext, HiddenTaps, LastTokens

__all__ = [
    "NO_INPUTS",
    "AttentionBackend",
    "AttentionMetadata",
    "BoundLayer",
    "BringsBackend",
    "CacheBackend",
    "CacheLayer",
    "ForwardContext",
    "HeadNorm",
    "HiddenTaps",
    "LastTokens",
    "LayerAttention",
    "SequenceGeometry",
    "StepGeometry",
]
