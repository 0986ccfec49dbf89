"""Attention in both directions over the whole texts of a step, without a KV cache.

Suffixes: T tokens of the step, S tokens of one text, H query heads, K KV heads, D head size, X concatenated heads.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.attention.base import SequenceGeometry
from penstock.attention.cpu_native import head_preparation
from penstock.attention.step import AttentionStep, LayerAttention, Projection
from penstock.kernels.native import NATIVE
from penstock.kernels.native.attention import HeadShape, StepRequests


@dataclass(frozen=True, slots=True)
class WholeTextsMetadata:
    """The step's texts, and the same as arguments of the C++ kernel."""

    sequences: SequenceGeometry
    requests: StepRequests


class WholeTextsBackend:
    """Attention of layers that are not causal: to all tokens of a text, or to those in the window on either side."""

    def __init__(self) -> None:
        self._shapes: dict[str, HeadShape] = {}

    def make_metadata(self, sequences: SequenceGeometry) -> WholeTextsMetadata:
        """Compute the step's metadata, once for all layers."""
        requests = sequences.query_start_loc, sequences.seq_lens, sequences.num_actual_reqs
        return WholeTextsMetadata(sequences, StepRequests.without_blocks(*requests))

    def run(self, step: AttentionStep) -> Tensor:
        """See `AttentionBackend.run`; there is no cache to write to, and all tokens attend. Padding rows are zero."""
        mixed = self._attend(step)
        return mixed if step.last is None else mixed.index_select(0, step.last.rows_R)

    def _attend(self, step: AttentionStep) -> Tensor:
        rows = step.rows
        if NATIVE is not None and isinstance(rows, Projection) and NATIVE.runs(rows.qkv_TX):
            is_prepared = rows.norm is None and rows.rotation is None
            preparation = None if is_prepared else head_preparation(rows)
            if is_prepared or preparation is not None:
                shape = self._shape(step.layer)
                return NATIVE.attention.whole_texts(rows.qkv_TX, step.metadata.requests, shape, preparation)
        output_THD = _attend_reference(step)
        return output_THD.flatten(1) if isinstance(rows, Projection) else output_THD

    def _shape(self, layer: LayerAttention) -> HeadShape:
        shape = self._shapes.get(layer.name)
        if shape is None:
            window = None if layer.sliding_window is None else layer.sliding_window - 1
            assert window != 0, "a window of one position is no attention"
            heads = layer.num_heads, layer.num_kv_heads, layer.head_size
            shape = self._shapes[layer.name] = HeadShape(*heads, 1, layer.scale, window, layer.soft_cap)
        return shape


def _attend_reference(step: AttentionStep) -> Tensor:
    """The specification, text by text: [T, H, D]."""
    query_THD, key_TKD, value_TKD = step.heads()
    sequences = step.metadata.sequences
    out_THD = torch.zeros_like(query_THD, memory_format=torch.contiguous_format)
    starts = sequences.query_start_loc_np[: sequences.num_actual_reqs + 1].tolist()
    for begin, end in itertools.pairwise(starts):
        rows = slice(begin, end)
        out_THD[rows] = attend_text(step.layer, query_THD[rows], key_TKD[rows], value_TKD[rows])
    return out_THD


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
