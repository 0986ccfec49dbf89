"""What backends share whose cache is token-major, [2, num_blocks, block_size, K, D]."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from penstock.attention.base import AttentionBackend, LayerAttention, StepGeometry


class TokenMajorBackend(AttentionBackend):
    """Writes the step's keys and values, and leaves padding out; the attention itself is the subclass's."""

    @staticmethod
    def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    def make_metadata(self, geometry: StepGeometry) -> StepGeometry:
        return geometry

    def forward(
        self,
        layer: LayerAttention,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        kv_cache: Tensor,
        metadata: StepGeometry,
    ) -> Tensor:
        output_THD = torch.zeros_like(query_THD)
        num_tokens = metadata.num_actual_tokens
        if num_tokens > 0:
            if not metadata.is_written:
                self.write(layer, key_TKD, value_TKD, kv_cache, metadata)
            output_THD[:num_tokens] = self.attend(layer, query_THD[:num_tokens], kv_cache, metadata)
        return output_THD

    def write(
        self,
        layer: LayerAttention,
        key_TKD: Tensor,
        value_TKD: Tensor,
        kv_cache: Tensor,
        metadata: StepGeometry,
    ) -> None:
        num_tokens = metadata.num_actual_tokens
        rows = metadata.slot_mapping[:num_tokens]
        for half, new_TKD in zip(kv_cache.flatten(1, 2), (key_TKD, value_TKD), strict=True):
            half.index_copy_(0, rows, new_TKD[:num_tokens].to(half.dtype))

    @abstractmethod
    def attend(self, layer: LayerAttention, query_THD: Tensor, kv_cache: Tensor, geometry: StepGeometry) -> Tensor:
        """[T, H, D] for the actual tokens; their keys and values are in the cache."""
