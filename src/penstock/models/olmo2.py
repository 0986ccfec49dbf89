"""OLMo 2 (OLMo team 2025, https://arxiv.org/abs/2501.00656)."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.kernels.rotary import Rotation
from penstock.kernels.rows import sum_rows
from penstock.layers.mlp import GatedMLP
from penstock.layers.norm import RMSNormRoundedLast, SplitWholeQueryKeyNorm, WholeQueryKeyNorm
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import (
    DECODER_WEIGHTS,
    AttentionNorm,
    DecoderConfig,
    DecoderForCausalLM,
    DecoderModel,
    SelfAttention,
)
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState, heads_of_rank


class Olmo2Layer(nn.Module):
    """x + norm(attention(x)), then x + norm(mlp(x)). Suffixes: T tokens, D hidden size."""

    def __init__(self, config: DecoderConfig, self_attn: SelfAttention, parallel: ParallelState) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNormRoundedLast(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, activation=config.activation, bias=False, parallel=parallel
        )
        self.post_feedforward_layernorm = RMSNormRoundedLast(config.hidden_size, config.norm_eps)

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        if residual_TD is not None:
            hidden_TD = sum_rows(hidden_TD, residual_TD)
        mixed_TD = self.post_attention_layernorm(self.self_attn(hidden_TD, rotation, context))
        hidden_TD = sum_rows(mixed_TD, context.narrowed(hidden_TD))
        return self.post_feedforward_layernorm(self.mlp(hidden_TD, context)), hidden_TD


class Olmo2ForCausalLM(DecoderForCausalLM):
    """The plain decoder with norms after attention and MLP, not before, and query and key norms over all heads."""

    weight_table: ClassVar[WeightTable] = {
        **{name: into for name, into in DECODER_WEIGHTS.items() if not name.endswith("input_layernorm")},
        "model.layers.*.self_attn.q_norm": Into("model.layers.*.self_attn.query_key_norm.q_norm"),
        "model.layers.*.self_attn.k_norm": Into("model.layers.*.self_attn.query_key_norm.k_norm"),
        "model.layers.*.post_feedforward_layernorm": Into("model.layers.*.post_feedforward_layernorm"),
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        bias = fields.flag("attention_bias", default=False)

        def layer(index: int) -> Olmo2Layer:
            attention = SelfAttention(
                config,
                index,
                parallel,
                qkv_bias=bias,
                output_bias=bias,
                query_key_norm=whole_query_key_norm(config, parallel),
            )
            return Olmo2Layer(config, attention, parallel)

        norm = RMSNormRoundedLast(config.hidden_size, config.norm_eps)
        super().__init__(config, parallel, DecoderModel(config, parallel, layer, norm=norm))


def whole_query_key_norm(config: DecoderConfig, parallel: ParallelState) -> AttentionNorm:
    """Query and key norms over all heads, which may be split over the ranks."""
    if parallel.tensor.size == 1:
        return WholeQueryKeyNorm
    heads, kv_heads = heads_of_rank(config.num_heads, config.num_kv_heads, parallel.tensor)
    return partial(SplitWholeQueryKeyNorm, heads=heads, kv_heads=kv_heads, group=parallel.tensor)
