"""Base of backends with a token-major cache, [2, num_blocks, block_size, K, D]: keys, then values of a block.

Of latent attention, [1, num_blocks, block_size, 1, D].
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from penstock.attention.base import AttentionBackend, StepGeometry, keys_then_values
from penstock.attention.step import AttentionStep
from penstock.contract import AttentionSpec, MLAAttentionSpec
from penstock.device.base import TORCH_DTYPES
from penstock.kernels.paged_attention import as_stored


class TokenMajorBackend(AttentionBackend):
    """Writes keys and values; subclasses compute attention."""

    def view_pages(self, pages_NX: Tensor, spec: AttentionSpec) -> Tensor:
        if isinstance(spec, MLAAttentionSpec):
            sizes = -1, spec.block_size, spec.num_kv_heads, spec.elements_per_head
            return pages_NX.view(TORCH_DTYPES[spec.dtype]).view(1, *sizes)
        return keys_then_values(pages_NX, spec.dtype, spec.block_size, spec.num_kv_heads, spec.elements_per_head)

    def make_metadata(self, geometry: StepGeometry) -> StepGeometry:
        return geometry

    def write(self, step: AttentionStep, key_TKD: Tensor, value_TKD: Tensor) -> None:
        layer, kv_cache, metadata = step.layer, step.kv_cache, step.metadata
        num_tokens = metadata.num_actual_tokens
        slots_T, block_size = metadata.slot_mapping[:num_tokens], metadata.block_size
        scales = layer.scales_in(kv_cache)
        if layer.latent_size is not None:
            _put(kv_cache.flatten(0, 2), slots_T, as_stored(key_TKD[:num_tokens], kv_cache.dtype, scales.key))
            return
        # Rows of [num_blocks, 2, block_size], which alternate between a block's keys and its values.
        key_rows_T = slots_T + torch.div(slots_T, block_size, rounding_mode="floor") * block_size
        rows_XKD = kv_cache.transpose(0, 1).flatten(0, 2)
        all_rows = key_rows_T, key_rows_T + block_size
        for rows_T, new_TKD, scale in zip(all_rows, (key_TKD, value_TKD), scales, strict=True):
            _put(rows_XKD, rows_T, as_stored(new_TKD[:num_tokens], kv_cache.dtype, scale))


class UnpaddedBackend(TokenMajorBackend):
    """Strips padding; subclasses attend with the actual tokens alone."""

    def attend(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        output_THD = query_THD.new_zeros(*query_THD.shape[:2], step.layer.value_size)
        num_tokens = step.metadata.num_actual_tokens
        if num_tokens > 0:
            output_THD[:num_tokens] = self.attend_tokens(step, query_THD[:num_tokens])
        return output_THD

    @abstractmethod
    def attend_tokens(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        """`attend` with the queries of the actual tokens, without padding."""


def _put(rows_XKD: Tensor, rows_T: Tensor, new_TKD: Tensor) -> None:
    """Copy to these rows of the cache; as bytes in FP8, which torch cannot scatter."""
    if new_TKD.dtype is torch.float8_e4m3fn:
        rows_XKD, new_TKD = rows_XKD.view(torch.uint8), new_TKD.view(torch.uint8)
    rows_XKD.index_copy_(0, rows_T, new_TKD)
