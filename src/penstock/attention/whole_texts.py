"""Attention in both directions over the whole texts of a step, without a KV cache.

Suffixes: T tokens of the step, S tokens of one text, H query heads, K KV heads, D head size, X concatenated heads.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.attention.context import ForwardContext
from penstock.attention.cpu_native import head_preparation
from penstock.attention.step import HeadNorm, LayerAttention, Projection
from penstock.kernels.native import NATIVE
from penstock.kernels.native.attention import HeadShape, StepRequests
from penstock.kernels.native.tracing import TracedRequests
from penstock.kernels.rotary import Rotation


def attend_texts(
    layer: LayerAttention,
    qkv_TX: Tensor,
    positions_T: Tensor,
    norm: HeadNorm | None,
    rotation: Rotation | None,
    context: ForwardContext,
) -> Tensor:
    """Attention from the output of the QKV projection, [T, (H + 2 * K) * D], which may be overwritten: [T, H * D].

    layer: its `sliding_window` counts visible positions, the current one included, on either side.
    """
    is_prepared = norm is None and rotation is None
    preparation = None if is_prepared or rotation is None else head_preparation(Projection(qkv_TX, norm, rotation))
    if NATIVE is not None and NATIVE.runs(qkv_TX) and (is_prepared or preparation is not None):
        return NATIVE.attention.whole_texts(qkv_TX, positions_T, _requests(context), _shape(layer), preparation)
    return _attend_reference(layer, qkv_TX, norm, rotation, context)


def _requests(context: ForwardContext) -> StepRequests | TracedRequests:
    """Requests of the step; while a program is recorded, the group after those of the KV cache."""
    sequences = context.sequences
    if sequences is None:
        return TracedRequests(len(context.metadata))
    return StepRequests.without_blocks(sequences.query_start_loc, sequences.seq_lens, sequences.num_actual_reqs)


def _shape(layer: LayerAttention) -> HeadShape:
    window = None if layer.sliding_window is None else layer.sliding_window - 1
    assert window != 0, "a window of one position is no attention"
    return HeadShape(layer.num_heads, layer.num_kv_heads, layer.head_size, 1, layer.scale, window, layer.soft_cap)


def _attend_reference(
    layer: LayerAttention, qkv_TX: Tensor, norm: HeadNorm | None, rotation: Rotation | None, context: ForwardContext
) -> Tensor:
    """The specification, text by text."""
    sequences = context.sequences
    assert sequences is not None, "a step has its sequences"
    query_THD, key_TKD, value_TKD = Projection(qkv_TX, norm, rotation).heads(layer)
    out_THD = torch.zeros_like(query_THD, memory_format=torch.contiguous_format)
    starts = sequences.query_start_loc_np[: sequences.num_actual_reqs + 1].tolist()
    for begin, end in itertools.pairwise(starts):
        rows = slice(begin, end)
        out_THD[rows] = attend_text(layer, query_THD[rows], key_TKD[rows], value_TKD[rows])
    return out_THD.flatten(1)


def attend_text(layer: LayerAttention, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor) -> Tensor:
    """Attention of one text in both directions: [S, H, D]."""
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query_SHD, key_SKD, value_SKD))
    mask_SS = None
    if layer.sliding_window is not None:
        positions_S = torch.arange(len(query_SHD), device=query_SHD.device)
        mask_SS = (positions_S[:, None] - positions_S[None]).abs() < layer.sliding_window
    if layer.soft_cap is None:
        mixed = F.scaled_dot_product_attention(query, key, value, mask_SS, scale=layer.scale, enable_gqa=True)
        return mixed[0].transpose(0, 1)
    groups = layer.num_heads // layer.num_kv_heads
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * layer.scale
    scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if mask_SS is not None:
        scores = scores.masked_fill(~mask_SS, -torch.inf)
    mixed = scores.float().softmax(-1).to(value.dtype) @ value.repeat_interleave(groups, 1)
    return mixed[0].transpose(0, 1)
