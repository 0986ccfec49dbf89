"""Attention over a paged KV cache: one file per backend, behind one interface."""

from penstock.attention.base import (
    AttentionBackend,
    BringsBackend,
    CacheBackend,
    CacheLayer,
    SequenceGeometry,
    StepGeometry,
)
from penstock.attention.context import NO_CONTEXT, AuxHiddenStates, BoundLayer, ForwardContext, LastTokens
from penstock.attention.row_inputs import NO_INPUTS
from penstock.attention.step import (
    AttentionMetadata,
    AttentionRows,
    AttentionStep,
    HeadNorm,
    Heads,
    LastRows,
    LayerAttention,
    Projection,
    SourceLengths,
)

__all__ = [
    "NO_CONTEXT",
    "NO_INPUTS",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionRows",
    "AttentionStep",
    "AuxHiddenStates",
    "BoundLayer",
    "BringsBackend",
    "CacheBackend",
    "CacheLayer",
    "ForwardContext",
    "HeadNorm",
    "Heads",
    "LastRows",
    "LastTokens",
    "LayerAttention",
    "Projection",
    "SequenceGeometry",
    "SourceLengths",
    "StepGeometry",
]
