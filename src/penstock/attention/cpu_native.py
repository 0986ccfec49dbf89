"""The CPU backend whose attention is one C++ kernel for any mix of decodes and prefill chunks.

It computes in float32, or in integers over an int8 cache, which has a scale for each position of each head.
Keys of the cache are [num_blocks, K, D, block_size], values [num_blocks, K, block_size, D]: either way the innermost
dimension is the one that the kernel computes many of at once. Of int8, rows are interleaved two by two. In memory a
head's values of a block follow its keys: pieces twice as long are read faster.

Where ranks keep the positions of the same KV heads by turns, a block has those that are here, and the kernel brings
query heads and results together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from penstock.attention.base import AttentionBackend, HeadNorm, LayerAttention, StepGeometry
from penstock.contract import AttentionSpec
from penstock.device.base import TORCH_DTYPES
from penstock.kernels.native import NATIVE
from penstock.kernels.native.attention import CACHE_TYPES, HeadShape, StepRequests
from penstock.kernels.native.tracing import TracedRequests
from penstock.kernels.rotary import Rotation, TableRotation


@dataclass(frozen=True, slots=True)
class CpuNativeMetadata:
    """The step's requests, and how many of its tokens are no padding. is_written: as in the geometry.

    block_size: positions of a block that are here.
    """

    requests: StepRequests
    num_tokens: int
    block_size: int
    is_written: bool


class CpuNativeBackend(AttentionBackend):
    name = "cpu_native"
    keeps_metadata = True
    shares_positions = True

    def __init__(self, layer: LayerAttention) -> None:
        super().__init__(layer)
        self._num_ranks = 1 if layer.context is None else layer.context.group.size
        self._shapes: dict[tuple[str, int], HeadShape] = {}

    @classmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        if device.type != "cpu":
            return "it runs on the CPU only"
        if NATIVE is None:
            return "the C++ kernels are not there or were turned off"
        if dtype not in CACHE_TYPES:
            return f"it keeps keys and values in {', '.join(map(str, CACHE_TYPES))}, not in {dtype}"
        if layer.context is not None and layer.context.group.meetings is None:
            return "ranks that share positions do not meet in shared memory"
        return None

    def view_pages(self, pages_NX: Tensor, spec: AttentionSpec) -> Tensor:
        sizes = spec.num_kv_heads, 2, spec.positions_per_page, spec.elements_per_head
        return pages_NX.view(TORCH_DTYPES[spec.dtype]).view(-1, *sizes).permute(2, 0, 1, 3, 4)

    def make_metadata(self, geometry: StepGeometry) -> CpuNativeMetadata:
        requests = StepRequests.of(
            geometry.query_start_loc, geometry.seq_lens, geometry.block_table, geometry.num_actual_reqs
        )
        block_size = geometry.block_size // self._num_ranks
        return CpuNativeMetadata(requests, geometry.num_actual_tokens, block_size, geometry.is_written)

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
            return torch.zeros_like(query_THD, memory_format=torch.contiguous_format)
        output_THD = NATIVE.attention(
            _as_the_kernel_takes_it(query_THD),
            _as_the_kernel_takes_it(key_TKD),
            _as_the_kernel_takes_it(value_TKD),
            kv_cache,
            metadata.requests,
            self._shape(layer, metadata.block_size),
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
        NATIVE.attention.write(keys, values, kv_cache, metadata.requests, self._shape(layer, metadata.block_size))

    def forward_projected(
        self,
        layer: LayerAttention,
        qkv_TX: Tensor,
        norm: HeadNorm | None,
        rotation: Rotation,
        kv_cache: Tensor,
        metadata: CpuNativeMetadata | TracedRequests,
    ) -> Tensor:
        if not _prepares_heads(rotation, norm) or metadata.num_tokens == 0:
            return super().forward_projected(layer, qkv_TX, norm, rotation, kv_cache, metadata)
        return self._from_projection(layer, qkv_TX, norm, rotation, kv_cache, metadata)

    def forward_last_projected(
        self,
        layer: LayerAttention,
        qkv_TX: Tensor,
        norm: HeadNorm | None,
        rotation: Rotation,
        kv_cache: Tensor,
        metadata: CpuNativeMetadata,
        rows_R: Tensor,
        last_metadata: CpuNativeMetadata | TracedRequests,
    ) -> Tensor:
        if not _prepares_heads(rotation, norm):
            return super().forward_last_projected(
                layer, qkv_TX, norm, rotation, kv_cache, metadata, rows_R, last_metadata
            )
        if isinstance(last_metadata, TracedRequests):
            return self._from_projection(layer, qkv_TX, norm, rotation, kv_cache, last_metadata)
        assert NATIVE is not None, "why_not refuses a machine without the kernels"
        NATIVE.attention.write_from_projection(
            qkv_TX,
            kv_cache,
            metadata.requests,
            self._shape(layer, metadata.block_size),
            norm=None if norm is None else norm.rms_of_each_head,
            rotation=rotation.arguments,
        )
        rotation_R = TableRotation.of(rotation.table_PR, rotation.positions_T.index_select(0, rows_R))
        qkv_RX = qkv_TX.index_select(0, rows_R)
        return self._from_projection(layer, qkv_RX, norm, rotation_R, kv_cache, last_metadata)

    def _from_projection(
        self,
        layer: LayerAttention,
        qkv_TX: Tensor,
        norm: HeadNorm | None,
        rotation: TableRotation,
        kv_cache: Tensor,
        metadata: CpuNativeMetadata | TracedRequests,
    ) -> Tensor:
        assert NATIVE is not None, "why_not refuses a machine without the kernels"
        rms = None if norm is None else norm.rms_of_each_head
        if isinstance(metadata, TracedRequests):
            shape, where = self._shape(layer, kv_cache.shape[3]), (rotation.table_PR, rotation.positions_T)
            return NATIVE.attention.trace_from_projection(qkv_TX, kv_cache, metadata, shape, norm=rms, rotation=where)
        output_TX = NATIVE.attention.from_projection(
            qkv_TX,
            kv_cache,
            metadata.requests,
            self._shape(layer, metadata.block_size),
            norm=rms,
            rotation=rotation.arguments,
            is_written=metadata.is_written,
        )
        return _without_padding(output_TX, metadata)

    def _shape(self, layer: LayerAttention, block_size: int) -> HeadShape:
        shape = self._shapes.get((layer.name, block_size))
        if shape is None:
            shape = self._shapes[layer.name, block_size] = HeadShape(
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_size,
                block_size,
                layer.scale,
                layer.sliding_window,
                layer.soft_cap,
                *(() if layer.context is None else (layer.context.group.meetings, layer.context.interleave)),
            )
        return shape


def _prepares_heads(rotation: Rotation, norm: HeadNorm | None) -> TypeGuard[TableRotation]:
    """Whether the kernel can normalise and turn the heads itself."""
    return isinstance(rotation, TableRotation) and (norm is None or norm.rms_of_each_head is not None)


def _without_padding(output: Tensor, metadata: CpuNativeMetadata) -> Tensor:
    if metadata.num_tokens < output.shape[0]:
        output[metadata.num_tokens :] = 0
    return output


def _as_the_kernel_takes_it(heads_THD: Tensor) -> Tensor:
    """In float32, with a token's heads side by side: models may compute in bfloat16, or have their heads apart."""
    heads_THD = heads_THD.to(torch.float32)
    has_adjacent = heads_THD.stride(2) == 1 and heads_THD.stride(1) == heads_THD.shape[2]
    return heads_THD if has_adjacent else heads_THD.contiguous()
