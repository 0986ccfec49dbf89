"""The reference backend: correct on every device and dtype, padded and slow."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.attention.base import AttentionBackend, LayerAttention, StepGeometry
from penstock.kernels.paged_attention import paged_attention_reference


class ReferenceBackend(AttentionBackend):
    """Attention by definition, for tests and for devices that have nothing better."""

    name = "reference"

    @classmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        return None

    @staticmethod
    def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    def prepare(self, geometry: StepGeometry) -> StepGeometry:
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
        num_tokens = metadata.num_actual_tokens
        if num_tokens == 0:
            return torch.zeros_like(query_THD)
        write_kv_token_major(kv_cache, key_TKD, value_TKD, metadata)
        num_reqs = metadata.num_actual_reqs
        output = torch.zeros_like(query_THD)
        output[:num_tokens] = paged_attention_reference(
            query_THD[:num_tokens],
            kv_cache[0],
            kv_cache[1],
            metadata.block_table[:num_reqs],
            metadata.query_start_loc,
            metadata.seq_lens[:num_reqs],
            metadata.max_query_len,
            layer.scale,
            layer.sliding_window,
        )
        return output


def write_kv_token_major(kv_cache: Tensor, key_TKD: Tensor, value_TKD: Tensor, geometry: StepGeometry) -> None:
    """Write a step's keys and values into a cache [2, num_blocks, block_size, K, D]; padding writes nothing."""
    num_tokens = geometry.num_actual_tokens
    rows = geometry.slot_mapping[:num_tokens]
    flat = kv_cache.flatten(1, 2)
    flat[0].index_copy_(0, rows, key_TKD[:num_tokens])
    flat[1].index_copy_(0, rows, value_TKD[:num_tokens])
