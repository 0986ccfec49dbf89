"""A model without any KV cache, with attention in both directions, and a head that pools hidden states.

Suffixes: T tokens of the step, S tokens of one prompt, H heads, K KV heads, D head size or hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.contract.feature import Feature, register_feature
from penstock.features.pooling.base import PoolingHead
from penstock.kernels.rotary import Rotation
from penstock.layers.parallel_linear import QKVParallelLinear, RowParallelLinear
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderLayer, DecoderModel
from penstock.models.registry import register_model
from penstock.parallel import ParallelState
from penstock.step.frame import Frame, RowOutput, WantedOutputs

ARCHITECTURE = "BidirectionalLlama"
HEAD = "mean"
LAST_TOKEN_HEAD = "last_token"
# A score falls by this much for each position between query and key.
SLOPE = 0.1


def attend(query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor) -> Tensor:
    """Attention of one prompt in both directions: [S, H * D]."""
    num_tokens, num_heads, size = query_SHD.shape
    groups = num_heads // key_SKD.shape[1]
    key_SHD, value_SHD = key_SKD.repeat_interleave(groups, 1), value_SKD.repeat_interleave(groups, 1)
    positions_S = torch.arange(num_tokens)
    distance_SS = (positions_S[:, None] - positions_S[None]).abs()
    scores_HSS = torch.einsum("ihd,jhd->hij", query_SHD, key_SHD) * size**-0.5 - SLOPE * distance_SS
    return torch.einsum("hij,jhd->ihd", scores_HSS.softmax(-1), value_SHD).flatten(1)


class BidirectionalAttention(nn.Module):
    """Attention over the whole prompts of a step, of which nothing is kept."""

    def __init__(self, config: DecoderConfig, parallel: ParallelState) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            bias=False,
            parallel=parallel,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_size, config.hidden_size, bias=False, parallel=parallel
        )
        self.head_size = config.head_size

    def forward(self, hidden_TD: Tensor, rotation: Rotation, context: ForwardContext) -> Tensor:
        qkv_TX = self.qkv_proj(hidden_TD, context.of_all_tokens())
        width = self.qkv_proj.num_heads * self.head_size
        (mixed_TX,) = context.opaque(self.attend_all, qkv_TX, widths=[width])
        return self.o_proj(context.narrowed(mixed_TX), context)  # type: ignore[no-any-return]

    def attend_all(self, context: ForwardContext, qkv_TX: Tensor) -> list[Tensor]:
        sequences = context.sequences
        assert sequences is not None, "a step has its sequences"
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        heads_THD = qkv_TX.view(len(qkv_TX), -1, self.head_size)
        query_THD, key_TKD, value_TKD = heads_THD.split([num_heads, num_kv_heads, num_kv_heads], 1)
        out_TX = torch.zeros(len(qkv_TX), num_heads * self.head_size)
        starts = sequences.query_start_loc_np[: sequences.num_actual_reqs + 1].tolist()
        for begin, end in itertools.pairwise(starts):
            rows = slice(begin, end)
            out_TX[rows] = attend(query_THD[rows], key_TKD[rows], value_TKD[rows])
        return [out_TX]


class BidirectionalLlama(DecoderForCausalLM):
    """Llama whose tokens see all of their prompt."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        config = DecoderConfig.read(ConfigFields(model_config))

        def layer(index: int) -> DecoderLayer:
            attention: Any = BidirectionalAttention(config, parallel)
            return DecoderLayer(config, attention, parallel)

        super().__init__(config, parallel, DecoderModel(config, parallel, layer))


class MeanPooling(PoolingHead):
    """The mean of a prompt's last hidden states."""

    def wants(self, frame: Frame) -> WantedOutputs:
        return WantedOutputs(all_rows=True)

    def pool(self, frame: Frame, is_complete: Sequence[bool]) -> list[Tensor]:
        assert frame.all_hidden is not None, "all rows were wanted"
        assert all(is_complete), "prompts come whole"
        starts = frame.batch.layout.query_start_loc_np[: len(frame.req_ids) + 1].tolist()
        return [frame.all_hidden[begin:end].mean(0) for begin, end in itertools.pairwise(starts)]


class LastTokenPooling(PoolingHead):
    """The last hidden state of a prompt, which may come in chunks."""

    def wants(self, frame: Frame) -> WantedOutputs:
        return WantedOutputs(RowOutput.HIDDEN)

    def pool(self, frame: Frame, is_complete: Sequence[bool]) -> list[Tensor | None]:
        assert frame.hidden is not None, "rows of last tokens were wanted"
        return [row if complete else None for row, complete in zip(frame.hidden, is_complete, strict=True)]


def register() -> None:
    register_model(ARCHITECTURE, BidirectionalLlama)
    heads = {HEAD: MeanPooling, LAST_TOKEN_HEAD: LastTokenPooling}
    register_feature(Feature(name="mean pooling", output_heads=heads))
