"""CPU backend with one C++ kernel for any mix of decodes and prefill chunks.

It computes in float32, in integers over an int8 KV cache with one scale per position and head, or in bfloat16
arithmetic over a bfloat16 one.
Keys are stored as [num_blocks, K, D, block_size], values as [num_blocks, K, block_size, D]: the innermost dimension is
the kernel's vector dimension. Int8 rows are interleaved in pairs. In memory a head's values of a block follow its
keys, because longer contiguous reads are faster. Latents are stored once, as [num_blocks, block_size, D].

With decode context parallelism, a block has this rank's positions only, and the kernel exchanges query heads and
partial results between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.attention.base import AttentionBackend, HeadNorm, LayerAttention, StepGeometry
from penstock.contract import AttentionSpec, MLAAttentionSpec
from penstock.device.base import TORCH_DTYPES
from penstock.kernels.native import NATIVE, Bfloat16Layout
from penstock.kernels.native.attention import CACHE_TYPES, HeadPreparation, HeadShape, StepRequests
from penstock.kernels.rotary import Rotation, TableRotation


@dataclass(frozen=True, slots=True)
class CpuNativeMetadata:
    """The step's requests, and its tokens without padding. is_written: as in the geometry."""

    requests: StepRequests
    num_tokens: int | None
    is_written: bool


class CpuNativeBackend(AttentionBackend):
    name = "cpu_native"
    keeps_metadata = True
    shares_positions = True
    attends_latents = True
    biases_distances = True

    def __init__(self, layer: LayerAttention) -> None:
        super().__init__(layer)
        self._shapes: dict[tuple[str, int], HeadShape] = {}

    @classmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        if device.type != "cpu":
            return "it runs on the CPU only"
        if NATIVE is None:
            return "the C++ kernels are not built or are turned off"
        if dtype not in CACHE_TYPES:
            return f"it supports KV caches of {', '.join(map(str, CACHE_TYPES))}, not {dtype}"
        if layer.latent_size is not None and not dtype.is_floating_point:
            return f"it does not support a {dtype} KV cache of latents"
        if layer.context is not None and layer.context.group.collectives is None:
            return "decode context parallel ranks have no shared memory in common"
        return None

    def view_pages(self, pages_NX: Tensor, spec: AttentionSpec) -> Tensor:
        if isinstance(spec, MLAAttentionSpec):
            return pages_NX.view(TORCH_DTYPES[spec.dtype]).view(1, -1, 1, spec.block_size, spec.elements_per_head)
        sizes = spec.num_kv_heads, 2, spec.positions_per_page, spec.elements_per_head
        return pages_NX.view(TORCH_DTYPES[spec.dtype]).view(-1, *sizes).permute(2, 0, 1, 3, 4)

    def make_metadata(self, geometry: StepGeometry) -> CpuNativeMetadata:
        requests = StepRequests.of(
            geometry.query_start_loc, geometry.seq_lens, geometry.block_table, geometry.num_actual_reqs
        )
        return CpuNativeMetadata(requests, geometry.num_actual_tokens, geometry.is_written)

    def forward(
        self,
        layer: LayerAttention,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        kv_cache: Tensor,
        metadata: CpuNativeMetadata,
    ) -> Tensor:
        assert NATIVE is not None, "why_not refuses a machine without the kernels"
        if metadata.num_tokens == 0:
            return query_THD.new_zeros(*query_THD.shape[:2], layer.value_size)
        output_THD = NATIVE.attention(
            _as_the_kernel_takes_it(query_THD),
            _as_the_kernel_takes_it(key_TKD),
            _as_the_kernel_takes_it(value_TKD),
            kv_cache,
            metadata.requests,
            self._shape(layer, kv_cache),
            is_written=metadata.is_written,
        )
        return _without_padding(output_THD, metadata).to(query_THD.dtype)

    def write(
        self,
        layer: LayerAttention,
        key_TKD: Tensor,
        value_TKD: Tensor,
        kv_cache: Tensor,
        metadata: CpuNativeMetadata,
    ) -> None:
        assert NATIVE is not None, "why_not refuses a machine without the kernels"
        keys, values = _as_the_kernel_takes_it(key_TKD), _as_the_kernel_takes_it(value_TKD)
        NATIVE.attention.write(keys, values, kv_cache, metadata.requests, self._shape(layer, kv_cache))

    def forward_projected(
        self,
        layer: LayerAttention,
        qkv_TX: Tensor,
        norm: HeadNorm | None,
        rotation: Rotation,
        kv_cache: Tensor,
        metadata: CpuNativeMetadata,
    ) -> Tensor:
        preparation = head_preparation(rotation, norm)
        if preparation is None or metadata.num_tokens == 0:
            return super().forward_projected(layer, qkv_TX, norm, rotation, kv_cache, metadata)
        assert NATIVE is not None, "why_not refuses a machine without the kernels"
        output_TX = NATIVE.attention.from_projection(
            qkv_TX,
            kv_cache,
            metadata.requests,
            self._shape(layer, kv_cache),
            preparation,
            is_written=metadata.is_written,
        )
        return _without_padding(output_TX, metadata)

    def forward_last_projected(
        self,
        layer: LayerAttention,
        qkv_TX: Tensor,
        norm: HeadNorm | None,
        rotation: Rotation,
        kv_cache: Tensor,
        metadata: CpuNativeMetadata,
        rows_R: Tensor,
        last_metadata: CpuNativeMetadata,
    ) -> Tensor:
        preparation = head_preparation(rotation, norm)
        if preparation is None:
            return super().forward_last_projected(
                layer, qkv_TX, norm, rotation, kv_cache, metadata, rows_R, last_metadata
            )
        assert NATIVE is not None, "why_not refuses a machine without the kernels"
        shape = self._shape(layer, kv_cache)
        return NATIVE.attention.last_from_projection(
            qkv_TX, kv_cache, metadata.requests, shape, preparation, rows_R, last_metadata.requests
        )

    def _shape(self, layer: LayerAttention, kv_cache: Tensor) -> HeadShape:
        # Local positions of a block.
        block_size = kv_cache.shape[3]
        shape = self._shapes.get((layer.name, block_size))
        if shape is None:
            shape = self._shapes[layer.name, block_size] = HeadShape(
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_size,
                block_size,
                layer.scale,
                layer.window,
                layer.soft_cap,
                layer.sinks,
                *((None, 1) if layer.context is None else (layer.context.group.collectives, layer.context.interleave)),
                layer.latent_size or 0,
                bfloat16_layout(layer, kv_cache.dtype),
                None if layer.alibi_slopes is None else torch.tensor(layer.alibi_slopes, dtype=torch.float32),
            )
        return shape


def bfloat16_layout(layer: LayerAttention, dtype: torch.dtype) -> Bfloat16Layout | None:
    """The order of products in bfloat16 arithmetic over a KV cache of this dtype; None for float32 arithmetic.

    Latents, and heads of an odd size or of fewer than 16 elements, are multiplied in float32.
    """
    takes_pairs = layer.latent_size is None and layer.head_size % 2 == 0 and layer.head_size >= 16
    is_wanted = layer.cpu_arithmetic == "bfloat16" and dtype is torch.bfloat16
    return NATIVE.bfloat16_layout if NATIVE is not None and is_wanted and takes_pairs else None


def head_preparation(rotation: Rotation, norm: HeadNorm | None) -> HeadPreparation | None:
    """The kernel's fused normalisation and rotary embedding; None where it does not support these."""
    if not isinstance(rotation, TableRotation):
        return None
    if norm is None:
        return HeadPreparation(rotation.positions_T, rotation.table_PR)
    rms = norm.rms_of_each_head
    if rms is None:
        return None
    return HeadPreparation(rotation.positions_T, rotation.table_PR, *rms, norm_is_last=norm.follows_rotation)


def _without_padding(output: Tensor, metadata: CpuNativeMetadata) -> Tensor:
    # A recording has no number of tokens; its program zeroes the padding.
    if metadata.num_tokens is not None and metadata.num_tokens < output.shape[0]:
        output[metadata.num_tokens :] = 0
    return output


def _as_the_kernel_takes_it(heads_THD: Tensor) -> Tensor:
    """Convert to contiguous float32, the kernel's input: models may compute in bfloat16 or have strided heads."""
    heads_THD = heads_THD.to(torch.float32)
    has_adjacent = heads_THD.stride(2) == 1 and heads_THD.stride(1) == heads_THD.shape[2]
    return heads_THD if has_adjacent else heads_THD.contiguous()
