"""CUDA backends with Triton kernels: split-KV decodes and verifications, and prefills mixed with decodes.

The kernels take padded tensors as they are, and their launches depend on shapes and on `max_query_len` only. So a step
whose requests have one token each can be captured in a CUDA graph, and replayed for fewer requests.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from penstock.attention.base import keys_then_values
from penstock.attention.step import AttentionStep, LayerAttention, Projection
from penstock.attention.token_major import TokenMajorBackend
from penstock.contract import AttentionSpec, MLAAttentionSpec
from penstock.device.capability import choices_of, gpu_capability
from penstock.kernels.rotary import TableRotation
from penstock.kernels.triton import has_triton
from penstock.system.env import interprets_triton

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
_MIN_BLOCK_SIZE, _MAX_HEAD_SIZE, _MAX_LATENT_SIZE = 16, 256, 512


def _why_no_latents(layer: LayerAttention, dtype: torch.dtype) -> str | None:
    assert layer.latent_size is not None, "a layer of latent attention"
    if dtype is torch.float8_e4m3fn:
        return "it supports no FP8 KV cache of latents"
    if layer.latent_size > _MAX_LATENT_SIZE:
        return f"it supports latents of up to {_MAX_LATENT_SIZE} elements, not {layer.latent_size}"
    if layer.window is not None or layer.soft_cap is not None or layer.sinks is not None:
        return "it supports no windows, chunks, soft caps and sinks over latents"
    return None


class TritonPagedBackend(TokenMajorBackend):
    """Metadata is the step's geometry. Padding has negative slots and rows of length 0."""

    name = "triton_paged"
    keeps_metadata = True
    is_capturable = True
    attends_latents = True
    sees_later_tokens = True
    is_invariant: ClassVar[bool] = False

    def view_pages(self, pages_NX: Tensor, spec: AttentionSpec) -> Tensor:
        """[2, num_blocks, block_size, K, D], where the positions of a head lie together within a block.

        Of latent attention, [1, num_blocks, block_size, 1, D].
        """
        if isinstance(spec, MLAAttentionSpec):
            return super().view_pages(pages_NX, spec)
        sizes = spec.num_kv_heads, spec.block_size, spec.elements_per_head
        return keys_then_values(pages_NX, spec.dtype, *sizes).transpose(2, 3)

    @classmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        if device.type != "cuda" and not (device.type == "cpu" and interprets_triton()):
            return "it runs on CUDA only"
        if not has_triton():
            return "Triton is not installed"
        if dtype not in _DTYPES:
            return f"it supports KV caches of {', '.join(map(str, _DTYPES))}, not {dtype}"
        if dtype is torch.float8_e4m3fn and not choices_of(gpu_capability()).has_float8:
            return "an FP8 KV cache needs a GPU of compute capability 8.9"
        if block_size < _MIN_BLOCK_SIZE or block_size & (block_size - 1):
            return f"it needs a block_size that is a power of two and at least {_MIN_BLOCK_SIZE}, not {block_size}"
        if layer.latent_size is not None:
            return _why_no_latents(layer, dtype)
        if layer.head_size > _MAX_HEAD_SIZE:
            return f"it supports heads of up to {_MAX_HEAD_SIZE} dimensions, not {layer.head_size}"
        return None

    def run(self, step: AttentionStep) -> Tensor:
        rows = step.rows
        if isinstance(rows, Projection):
            query_THD = self._rotate_and_write(step, rows)
            if query_THD is not None:
                return self.attend(*step.narrow(query_THD)).flatten(1)
        return super().run(step)

    def write(self, step: AttentionStep, key_TKD: Tensor, value_TKD: Tensor) -> None:
        from penstock.kernels.triton.kv_cache import write_kv

        kv_cache, scales = step.kv_cache, step.layer.scales_in(step.kv_cache)
        if step.layer.latent_size is not None:
            value_TKD = key_TKD  # written once more, to the same place
        write_kv(key_TKD, value_TKD, kv_cache[0], kv_cache[-1], step.metadata.slot_mapping, scales)

    def attend(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        layer, kv_cache, geometry = step.layer, step.kv_cache, step.metadata
        if layer.latent_size is not None:
            return self._attend_latents(step, query_THD)
        from penstock.kernels.triton.paged_attention import decode_attention, prefill_attention
        from penstock.kernels.triton.split_attention import MOST_ROWS, split_attention

        parameters = layer.scale, layer.window, layer.soft_cap, layer.sink_values
        table, seq_lens, query_len = geometry.block_table, geometry.seq_lens, geometry.max_query_len
        scales = layer.scales_in(kv_cache)
        if query_len <= 1:
            decodes = query_THD, kv_cache[0], kv_cache[1], table, seq_lens, *parameters
            return decode_attention(*decodes, scales=scales)
        queries = query_THD, kv_cache[0], kv_cache[1], table, geometry.query_start_loc, seq_lens, *parameters
        if query_len * (layer.num_heads // layer.num_kv_heads) <= MOST_ROWS:
            return split_attention(*queries, scales=scales, ends_T=step.visible_ends, max_query_len=query_len)
        return prefill_attention(*queries, scales=scales, ends_T=step.visible_ends)

    def _attend_latents(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        from penstock.kernels.triton.latent_attention import latent_attention

        layer, geometry = step.layer, step.metadata
        assert layer.latent_size is not None, "a layer of latent attention"
        layout = geometry.block_table, geometry.query_start_loc, geometry.seq_lens
        parameters = layer.scale, layer.latent_size
        return latent_attention(query_THD, step.kv_cache[0], *layout, *parameters, is_invariant=self.is_invariant)

    def _rotate_and_write(self, step: AttentionStep, rows: Projection) -> Tensor | None:
        """Query heads [T, H, D] of one kernel, which writes keys and values too; None where it cannot do the norm."""
        from penstock.kernels.triton.kv_cache import rotate_and_write

        qkv_TX, norm, rotation = rows
        layer, kv_cache = step.layer, step.kv_cache
        if layer.latent_size is not None:
            return None
        rms = None if norm is None else norm.rms_of_each_head
        if norm is not None and rms is None:
            return None
        if qkv_TX.is_meta:
            return qkv_TX.new_empty(qkv_TX.shape[0], layer.num_heads, layer.head_size)
        if not isinstance(rotation, TableRotation):
            return None
        turned = qkv_TX, layer.num_heads, rotation.table_PR, rotation.positions_T
        written = kv_cache[0], kv_cache[1], step.metadata.slot_mapping
        norm_is_last = norm is not None and norm.follows_rotation
        return rotate_and_write(*turned, *written, rms, layer.scales_in(kv_cache), norm_is_last=norm_is_last)


class TritonInvariantBackend(TritonPagedBackend):
    """Batch-invariant paged attention: one kernel for all steps, with splits of a fixed size.

    A token's bits depend on no other request and no chunk.
    """

    name = "triton_invariant"
    is_invariant = True

    def attend(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        layer, kv_cache, geometry = step.layer, step.kv_cache, step.metadata
        if layer.latent_size is not None:
            return self._attend_latents(step, query_THD)
        from penstock.kernels.triton.split_attention import split_attention

        layout = geometry.block_table, geometry.query_start_loc, geometry.seq_lens
        queries = query_THD, kv_cache[0], kv_cache[1], *layout
        parameters = layer.scale, layer.window, layer.soft_cap, layer.sink_values
        scales = layer.scales_in(kv_cache)
        return split_attention(*queries, *parameters, scales=scales, ends_T=step.visible_ends)
