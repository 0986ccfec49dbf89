"""A forward context without paging: every sequence of the step attends over itself, by definition.

Suffixes: T tokens, S tokens of one sequence, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.attention import NO_CONTEXT, AttentionBackend, AttentionStep, ForwardContext, LayerAttention, Projection
from penstock.attention.context import BoundLayer
from penstock.models.attention_layers import attention_layers
from penstock.models.interface import LanguageModel


class PlainBackend(AttentionBackend):
    """Causal attention within sequences whose lengths are the metadata; keeps no cache."""

    name = "plain"

    @classmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        return None

    def view_pages(self, pages_NX: Tensor, spec: object) -> Tensor:
        return pages_NX

    def make_metadata(self, geometry: object) -> object:
        raise NotImplementedError

    def write(self, step: AttentionStep, key_TKD: Tensor, value_TKD: Tensor) -> None:
        raise NotImplementedError

    def attend(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        raise NotImplementedError

    def run(self, step: AttentionStep) -> Tensor:
        lengths = list(step.metadata)
        parts = zip(*(heads.split(lengths) for heads in step.heads()), strict=True)
        output_THD = torch.cat([_attend(step.layer, *part) for part in parts])
        return output_THD.flatten(1) if isinstance(step.rows, Projection) else output_THD


def plain_context(model: nn.Module, lengths: Sequence[int]) -> ForwardContext:
    """A context for sequences of these lengths, each from its first position on, one after the other."""
    layers = {
        name: BoundLayer(0, PlainBackend(layer), torch.empty(0)) for name, layer in attention_layers(model).items()
    }
    return ForwardContext(layers, [lengths])


def sequence_logits(model: LanguageModel, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits [S, V] of each of several sequences, run together in one step."""
    assert isinstance(model, nn.Module)
    lengths = [len(sequence) for sequence in sequences]
    input_ids = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.inference_mode():
        hidden = model(input_ids, positions, plain_context(model, lengths))
        return list(model.compute_logits(hidden, NO_CONTEXT).split(lengths))


def _attend(layer: LayerAttention, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor) -> Tensor:
    group = layer.num_heads // layer.num_kv_heads
    key_SHD, value_SHD = key_SKD.repeat_interleave(group, 1), value_SKD.repeat_interleave(group, 1)
    scores_HSS = torch.einsum("qhd,khd->hqk", query_SHD.float(), key_SHD.float()) * layer.scale
    if layer.soft_cap is not None:
        scores_HSS = layer.soft_cap * torch.tanh(scores_HSS / layer.soft_cap)
    distance_SS = torch.arange(len(query_SHD))[:, None] - torch.arange(len(query_SHD))
    if layer.alibi_slopes is not None:
        scores_HSS = scores_HSS - torch.tensor(layer.alibi_slopes).view(-1, 1, 1) * distance_SS
    hidden_SS = distance_SS < 0
    if layer.sliding_window is not None:
        hidden_SS |= distance_SS >= layer.sliding_window
    if layer.chunk_size is not None:
        chunks_S = torch.arange(len(query_SHD)) // layer.chunk_size
        hidden_SS |= chunks_S[:, None] != chunks_S
    scores_HSS = scores_HSS.masked_fill(hidden_SS, float("-inf"))
    if layer.sink_values is not None:
        sinks_HS1 = layer.sink_values.float()[:, None, None].expand(-1, len(query_SHD), 1)
        scores_HSS = torch.cat((scores_HSS, sinks_HS1), -1)
    weights_HSS = scores_HSS.softmax(-1)[..., : len(key_SKD)]
    return torch.einsum("hqk,khd->qhd", weights_HSS, value_SHD.float()).to(query_SHD.dtype)


def usual_difference(found: Tensor, expected: Tensor) -> float:
    """Relative difference of logits, the median over tokens: rounding changes the choice of experts of a few."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).median())
