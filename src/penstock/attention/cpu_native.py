"""The CPU backend whose attention is one C++ kernel for any mix of decodes and prefill chunks.

Keys of the cache are [num_blocks, K, D, block_size], values [num_blocks, K, block_size, D]: either way the innermost
dimension is the one that the kernel computes many of at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.attention.base import AttentionBackend, LayerAttention, StepGeometry
from penstock.kernels.native import NATIVE


class CpuNativeBackend(AttentionBackend):
    name = "cpu_native"

    @classmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        if device.type != "cpu":
            return "it runs on the CPU only"
        if NATIVE is None:
            return "the C++ kernels are not there or were turned off"
        return None if dtype is torch.float32 else f"it computes in float32, not {dtype}"

    @staticmethod
    def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_size)

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
        assert NATIVE is not None, "why_not refuses a machine without the kernels"
        if metadata.num_actual_tokens == 0:
            return torch.zeros_like(query_THD, memory_format=torch.contiguous_format)
        output_THD = NATIVE.attention(
            _with_adjacent_heads(query_THD),
            _with_adjacent_heads(key_TKD),
            _with_adjacent_heads(value_TKD),
            kv_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.num_actual_reqs,
            block_size=metadata.block_size,
            scale=layer.scale,
            sliding_window=layer.sliding_window,
            soft_cap=layer.soft_cap,
        )
        if metadata.num_actual_tokens < output_THD.shape[0]:
            output_THD[metadata.num_actual_tokens :] = 0
        return output_THD


def _with_adjacent_heads(heads_THD: Tensor) -> Tensor:
    """The tensor as it is where a token's heads lie side by side; models from elsewhere may have them apart."""
    has_adjacent = heads_THD.stride(2) == 1 and heads_THD.stride(1) == heads_THD.shape[2]
    return heads_THD if has_adjacent else heads_THD.contiguous()
