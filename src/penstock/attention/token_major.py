"""Base of backends with a token-major cache, [2, num_blocks, block_size, K, D]: keys, then values of a block.

Of latent attention, [1, num_blocks, block_size, 1, D].
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from penstock.attention.base import AttentionBackend, LayerAttention, StepGeometry, keys_then_values
from penstock.contract import AttentionSpec, MLAAttentionSpec
from penstock.device.base import TORCH_DTYPES


class TokenMajorBackend(AttentionBackend):
    """Writes keys and values, and strips padding; subclasses compute attention."""

    def view_pages(self, pages_NX: Tensor, spec: AttentionSpec) -> Tensor:
        if isinstance(spec, MLAAttentionSpec):
            sizes = -1, spec.block_size, spec.num_kv_heads, spec.elements_per_head
            return pages_NX.view(TORCH_DTYPES[spec.dtype]).view(1, *sizes)
        return keys_then_values(pages_NX, spec.dtype, spec.block_size, spec.num_kv_heads, spec.elements_per_head)

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
        output_THD = query_THD.new_zeros(*query_THD.shape[:2], layer.value_size)
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
        slots_T, block_size = metadata.slot_mapping[:num_tokens], metadata.block_size
        if layer.latent_size is not None:
            kv_cache.flatten(0, 2).index_copy_(0, slots_T, key_TKD[:num_tokens].to(kv_cache.dtype))
            return
        # Rows of [num_blocks, 2, block_size], which alternate between a block's keys and its values.
        key_rows_T = slots_T + torch.div(slots_T, block_size, rounding_mode="floor") * block_size
        rows_XKD = kv_cache.transpose(0, 1).flatten(0, 2)
        for rows_T, new_TKD in zip((key_rows_T, key_rows_T + block_size), (key_TKD, value_TKD), strict=True):
            rows_XKD.index_copy_(0, rows_T, new_TKD[:num_tokens].to(kv_cache.dtype))

    @abstractmethod
    def attend(self, layer: LayerAttention, query_THD: Tensor, kv_cache: Tensor, geometry: StepGeometry) -> Tensor:
        """Return [T, H, D] of the actual tokens, whose keys and values are in the cache."""
