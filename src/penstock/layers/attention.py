"""The attention layer of a model: what it computes and what it stores, whatever backend runs it.

Suffixes: T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from penstock.attention import ForwardContext, HeadNorm, LayerAttention
from penstock.contract import FullAttentionSpec, SlidingWindowSpec
from penstock.kernels.rotary import Rotation


class Attention(nn.Module):
    """Causal attention over a request's positions, of the last `sliding_window` ones if the layer has that."""

    def __init__(self, layer: LayerAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, context: ForwardContext) -> Tensor:
        """[T, H, D], or [R, H, D] where the context asks for last tokens only.

        The arguments may be strided views; their last dimension is contiguous.
        """
        return context.attend(self.layer, query_THD, key_TKD, value_TKD)

    def from_projection(
        self, qkv_TX: Tensor, norm: HeadNorm | None, rotation: Rotation, context: ForwardContext
    ) -> Tensor:
        """[T, H * D] from query, key and value heads side by side, [T, (H + 2 * K) * D], which it overwrites.

        [R, H * D] where the context asks for last tokens only.
        Query and key heads are normalised and turned before they attend.
        """
        return context.attend_projected(self.layer, qkv_TX, norm, rotation)

    def get_kv_cache_spec(self, block_size: int, dtype: str) -> FullAttentionSpec | SlidingWindowSpec:
        """What this layer keeps per block. block_size: positions that a rank keeps. dtype: of the cache, by name."""
        layer = self.layer
        num_ranks = 1 if layer.context is None else layer.context.group.size
        kept: dict[str, Any] = {
            "block_size": block_size * num_ranks,
            "num_kv_heads": layer.num_kv_heads,
            "head_size": layer.head_size,
            "dtype": dtype,
            "num_ranks": num_ranks,
        }
        if layer.sliding_window is None:
            return FullAttentionSpec(**kept)
        return SlidingWindowSpec(**kept, sliding_window=layer.sliding_window)
