"""Reference backend: correct on every device and dtype, padded and slow."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.attention.step import AttentionStep, LayerAttention
from penstock.attention.token_major import UnpaddedBackend
from penstock.kernels.paged_attention import paged_attention_reference


class ReferenceBackend(UnpaddedBackend):
    """Attention by its definition, for tests and as the fallback of any device."""

    name = "reference"
    attends_latents = True
    biases_distances = True
    sees_later_tokens = True

    @classmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        return None if dtype.is_floating_point else f"it does not support a {dtype} KV cache"

    def attend_tokens(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        layer, kv_cache, geometry = step.layer, step.kv_cache, step.metadata
        num_reqs = geometry.num_actual_reqs
        return paged_attention_reference(
            query_THD,
            kv_cache[0],
            kv_cache[0][..., -layer.latent_size :] if layer.latent_size is not None else kv_cache[1],
            geometry.block_table[:num_reqs],
            geometry.query_start_loc,
            geometry.seq_lens[:num_reqs],
            geometry.max_query_len,
            layer.scale,
            layer.window,
            layer.soft_cap,
            layer.sink_values,
            layer.scales_in(kv_cache),
            None if layer.alibi_slopes is None else torch.tensor(layer.alibi_slopes, device=query_THD.device),
            layer.bias_values,
            step.visible_ends,
        )
