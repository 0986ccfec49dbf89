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

from penstock.attention.base import AttentionBackend, StepGeometry
from penstock.attention.step import AttentionStep, Heads, LayerAttention, Projection
from penstock.contract import AttentionSpec, MLAAttentionSpec
from penstock.device.base import TORCH_DTYPES
from penstock.kernels.native import NATIVE, Bfloat16Layout
from penstock.kernels.native.attention import CACHE_TYPES, HeadPreparation, HeadShape, StepRequests
from penstock.kernels.rotary import TableRotation


@dataclass(frozen=True, slots=True)
class CpuNativeMetadata:
    """The step's requests, and its tokens without padding."""

    requests: StepRequests
    num_tokens: int | None


class CpuNativeBackend(AttentionBackend):
    name = "cpu_native"
    keeps_metadata = True
    pages_are_heads = True
    shares_positions = True
    attends_latents = True
    biases_distances = True
    sees_later_tokens = True

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
        if layer.distance_biases is not None and not NATIVE.attention.has_biases:
            return "these C++ kernels have no biases by distance; build them anew"
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
        return CpuNativeMetadata(requests, geometry.num_actual_tokens)

    def run(self, step: AttentionStep) -> Tensor:
        rows, metadata = step.rows, step.metadata
        if metadata.num_tokens == 0:
            return super().run(step)
        if isinstance(rows, Projection):
            preparation = head_preparation(rows)
            if preparation is None:
                return self.run(step._replace(rows=step.heads())).flatten(1)
            return self._run_fused(step, rows.qkv_TX, preparation)
        if step.last is not None:
            return super().run(step)
        assert NATIVE is not None, "why_not refuses a machine without the kernels"
        assert rows is not None, "a layer that writes has rows"
        heads = Heads(*map(_as_the_kernel_takes_it, rows))
        output_THD = NATIVE.attention(*heads, step.kv_cache, _requests(step), self._shape(step))
        return _without_padding(output_THD, metadata).to(rows.query_THD.dtype)

    def recorded_read(self, step: AttentionStep, query_TX: Tensor) -> Tensor | None:
        assert NATIVE is not None, "why_not refuses a machine without the kernels"
        return NATIVE.attention.recorded_read(query_TX, step.kv_cache, step.metadata, self._shape(step))

    def write(self, step: AttentionStep, key_TKD: Tensor, value_TKD: Tensor) -> None:
        if step.metadata.num_tokens == 0:
            return
        assert NATIVE is not None, "why_not refuses a machine without the kernels"
        keys, values = _as_the_kernel_takes_it(key_TKD), _as_the_kernel_takes_it(value_TKD)
        NATIVE.attention.write(keys, values, step.kv_cache, step.metadata.requests, self._shape(step))

    def attend(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        metadata = step.metadata
        if metadata.num_tokens == 0:
            return query_THD.new_zeros(*query_THD.shape[:2], step.layer.value_size)
        assert NATIVE is not None, "why_not refuses a machine without the kernels"
        queries = _as_the_kernel_takes_it(query_THD)
        output_THD = NATIVE.attention.attend(queries, step.kv_cache, _requests(step), self._shape(step))
        return _without_padding(output_THD, metadata).to(query_THD.dtype)

    def _run_fused(self, step: AttentionStep, qkv_TX: Tensor, preparation: HeadPreparation) -> Tensor:
        assert NATIVE is not None, "why_not refuses a machine without the kernels"
        call = qkv_TX, step.kv_cache, _requests(step), self._shape(step), preparation
        if step.last is None:
            return _without_padding(NATIVE.attention.from_projection(*call), step.metadata)
        rows_R, metadata = step.last
        return NATIVE.attention.last_from_projection(*call, rows_R, metadata.requests)

    def _shape(self, step: AttentionStep) -> HeadShape:
        layer, kv_cache = step.layer, step.kv_cache
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
                layer.distance_biases,
            )
        return shape


def _requests(step: AttentionStep) -> StepRequests:
    requests: StepRequests = step.metadata.requests
    return requests if step.visible_ends is None else requests.seeing(step.visible_ends)


def bfloat16_layout(layer: LayerAttention, dtype: torch.dtype) -> Bfloat16Layout | None:
    """The order of products in bfloat16 arithmetic over a KV cache of this dtype; None for float32 arithmetic.

    Latents, and heads of an odd size or of fewer than 16 elements, are multiplied in float32.
    """
    takes_pairs = layer.latent_size is None and layer.head_size % 2 == 0 and layer.head_size >= 16
    is_wanted = layer.cpu_arithmetic == "bfloat16" and dtype is torch.bfloat16
    return NATIVE.bfloat16_layout if NATIVE is not None and is_wanted and takes_pairs else None


def head_preparation(rows: Projection) -> HeadPreparation | None:
    """The kernel's fused normalisation and rotary embedding; None where it does not support these."""
    norm, rotation = rows.norm, rows.rotation
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
