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
from penstock.attention.context import NO_INPUTS, AuxHiddenStates, BoundLayer, ForwardContext, LastTokens

__all__ = [
    "NO_INPUTS",
    "AttentionBackend",
    "AttentionMetadata",
    "AuxHiddenStates",
    "BoundLayer",
    "BringsBackend",
    "CacheBackend",
    "CacheLayer",
    "ForwardContext",
    "HeadNorm",
    "LastTokens",
    "LayerAttention",
    "SequenceGeometry",
    "StepGeometry",
]
