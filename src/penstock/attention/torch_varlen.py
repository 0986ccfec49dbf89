"""CUDA backend: torch's variable-length attention over a paged cache (torch.nn.attention.varlen)."""

from __future__ import annotations

import functools
import inspect

import torch
from torch import Tensor

from penstock.attention.step import AttentionStep, LayerAttention
from penstock.attention.token_major import UnpaddedBackend


class TorchVarlenBackend(UnpaddedBackend):
    """Flash attention through torch. Support differs by release and GPU, so it is probed once."""

    name = "torch_varlen"

    @classmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        if device.type != "cuda":
            return "it runs on CUDA only"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in bfloat16 or float16, not {dtype}"
        if layer.soft_cap is not None:
            return "it does not support soft caps"
        if layer.chunk_size is not None:
            return "it does not support chunked local attention"
        if layer.sinks is not None:
            return "it does not support attention sinks"
        return _try(layer, dtype, device, block_size)

    def attend_tokens(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        if query_THD.is_meta:  # the output is all that the kernel allocates
            return torch.empty_like(query_THD)
        geometry = step.metadata
        num_reqs = geometry.num_actual_reqs
        return _varlen_attention(
            step.layer,
            query_THD,
            step.kv_cache,
            geometry.query_start_loc[: num_reqs + 1],
            geometry.seq_lens[:num_reqs],
            geometry.block_table[:num_reqs],
            geometry.max_query_len,
            geometry.max_seq_len_upper_bound,
        )


def _varlen_attention(
    layer: LayerAttention,
    query_THD: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if layer.sliding_window is None else layer.sliding_window - 1
    result = varlen_attn(
        query_THD,
        kv_cache[0],
        kv_cache[1],
        query_start_loc,
        None,
        max_query_len,
        max_seq_len,
        scale=layer.scale,
        window_size=(left, 0),
        enable_gqa=layer.num_heads != layer.num_kv_heads,
        seqused_k=seq_lens,
        block_table=block_table,
    )
    assert isinstance(result, Tensor)
    return result


@functools.cache
def _try(layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
    """Probe with one small step: neither torch's version nor the signature tells what the kernels accept."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no variable-length attention"
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return f"torch {torch.__version__} has variable-length attention, but not over paged caches"
    try:
        query = torch.zeros(2, layer.num_heads, layer.head_size, dtype=dtype, device=device)
        sizes = block_size, layer.num_kv_heads, layer.head_size
        # The layout of `view_pages`.
        kv_cache = torch.zeros(2, 2, *sizes, dtype=dtype, device=device).transpose(0, 1)
        starts = torch.tensor([0, 2], dtype=torch.int32, device=device)
        length = torch.tensor([2], dtype=torch.int32, device=device)
        table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        _varlen_attention(layer, query, kv_cache, starts, length, table, 2, 2)
        torch.cuda.synchronize(device)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
        return f"torch {torch.__version__} refuses it here: {str(error).splitlines()[0]}"
    return None
