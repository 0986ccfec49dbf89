"""Attention layer of a model, independent of the backend.

Suffixes: T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from penstock.attention import ForwardContext, HeadNorm, Heads, LayerAttention, Projection
from penstock.contract import (
    AttentionSpec,
    ChunkedLocalSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from penstock.kernels.rotary import Rotation
from penstock.layers.parallel_linear import rows_of_rank
from penstock.layers.weights import WeightSlot, new_parameter
from penstock.parallel import ParallelState, heads_of_rank


class HeadSinks(nn.Module):
    """`AttentionSinks`: a learned score of each query head. num_heads, num_kv_heads: over all ranks."""

    def __init__(self, num_heads: int, num_kv_heads: int, parallel: ParallelState) -> None:
        super().__init__()
        self._share, _ = heads_of_rank(num_heads, num_kv_heads, parallel.tensor)
        self.sinks = new_parameter(self._share.size)

    def slots(self) -> dict[str, WeightSlot]:
        return {"sinks": rows_of_rank(self.sinks, self._share)}


class Attention(nn.Module):
    """Attention as its layer describes it: causal over a KV cache, or in both directions over whole texts."""

    def __init__(self, layer: LayerAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, context: ForwardContext) -> Tensor:
        """[T, H, D] with the values' size D, or [R, H, D] where the context is narrowed to last tokens.

        The arguments may be strided views; their last dimension is contiguous.
        """
        return context.attend(self.layer, Heads(query_THD, key_TKD, value_TKD))

    def from_projection(
        self, qkv_TX: Tensor, norm: HeadNorm | None, rotation: Rotation | None, context: ForwardContext
    ) -> Tensor:
        """Attention from the output of the QKV projection, [T, (H + 2 * K) * D], which it overwrites: [T, H * D].

        Of latent attention, from [T, (H + 1) * D] to [T, H * latent_size].

        [R, H * D] where the context is narrowed to last tokens. Query and key heads are normalised and rotated first.
        """
        return context.attend(self.layer, Projection(qkv_TX, norm, rotation))

    def get_kv_cache_spec(self, block_size: int, dtype: str) -> AttentionSpec:
        """KV cache spec of this layer. block_size: positions per block on this rank. dtype: of the cache, by name."""
        layer = self.layer
        num_ranks = 1 if layer.context is None else layer.context.group.size
        if layer.latent_size is not None:
            return MLAAttentionSpec(block_size=block_size, head_size=layer.head_size, dtype=dtype)
        kept: dict[str, Any] = {
            "block_size": block_size * num_ranks,
            "num_kv_heads": layer.num_kv_heads,
            "head_size": layer.head_size,
            "dtype": dtype,
            "num_ranks": num_ranks,
        }
        if layer.chunk_size is not None:
            return ChunkedLocalSpec(**kept, chunk_size=layer.chunk_size)
        if layer.sliding_window is None:
            return FullAttentionSpec(**kept)
        return SlidingWindowSpec(**kept, sliding_window=layer.sliding_window)
