"""Decoder shared by Gemma 2 and 3: norms before and after attention and MLP, scaled embeddings, capped logits.

Suffixes: T tokens of the step, L logits rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.kernels.rotary import Rotation
from penstock.layers.embedding import ScaledVocabEmbedding
from penstock.layers.mlp import GatedMLP
from penstock.layers.norm import RMSNormRoundedLast
from penstock.layers.rope_scaling import RopeParameters
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import (
    DECODER_WEIGHTS,
    AttentionNorm,
    DecoderConfig,
    DecoderForCausalLM,
    DecoderModel,
    SelfAttention,
)
from penstock.models.layer_kinds import windows_of
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

# Stored norm weights are offsets from 1.
NORM_WEIGHT_OFFSET = 1.0
# Default of an absent field.
_DEFAULT_HEAD_SIZE = 256
_DEFAULT_QUERY_PRE_ATTN_SCALAR = 256
_DEFAULT_WINDOW = 4096


def read_gemma_config(fields: ConfigFields, rope: Callable[[int], RopeParameters] | None = None) -> DecoderConfig:
    """Read the configuration. rope: as in `DecoderConfig.read`."""
    fields.refuse_flags("use_bidirectional_attention")
    fields.integer("num_key_value_heads")
    return DecoderConfig.read(
        fields,
        default_head_size=_DEFAULT_HEAD_SIZE,
        tied_by_default=True,
        activation_field="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        rope=rope,
    )


class GemmaLayer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), with four separate norms."""

    def __init__(self, config: DecoderConfig, self_attn: SelfAttention, parallel: ParallelState) -> None:
        super().__init__()
        self.input_layernorm = _norm(config)
        self.self_attn = self_attn
        self.post_attention_layernorm = _norm(config)
        self.pre_feedforward_layernorm = _norm(config)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, activation=config.activation, bias=False, parallel=parallel
        )
        self.post_feedforward_layernorm = _norm(config)

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        if residual_TD is None:
            residual_TD = hidden_TD
            hidden_TD = self.input_layernorm(hidden_TD)
        else:
            hidden_TD, residual_TD = self.input_layernorm.add_and_norm(hidden_TD, residual_TD)
        hidden_TD = self.post_attention_layernorm(self.self_attn(hidden_TD, rotation, context))
        residual_TD = context.asked_for(residual_TD)
        hidden_TD, residual_TD = self.pre_feedforward_layernorm.add_and_norm(hidden_TD, residual_TD)
        return self.post_feedforward_layernorm(self.mlp(hidden_TD, context.rows_asked_for)), residual_TD


class GemmaForCausalLM(DecoderForCausalLM):
    """kinds: by layer, `FULL` or `SLIDING`. soft_cap, query_key_norm: as in `SelfAttention`.

    ropes: by layer; None takes the config's.
    """

    weight_table: ClassVar[WeightTable] = {
        **DECODER_WEIGHTS,
        "model.layers.*.pre_feedforward_layernorm": Into("model.layers.*.pre_feedforward_layernorm"),
        "model.layers.*.post_feedforward_layernorm": Into("model.layers.*.post_feedforward_layernorm"),
    }

    def __init__(
        self,
        fields: ConfigFields,
        config: DecoderConfig,
        parallel: ParallelState,
        kinds: Sequence[str],
        *,
        logits_soft_cap: float | None,
        soft_cap: float | None = None,
        query_key_norm: AttentionNorm | None = None,
        ropes: Sequence[RopeParameters] | None = None,
    ) -> None:
        windows = windows_of(fields, kinds, fields.optional_integer("sliding_window", default=_DEFAULT_WINDOW))
        bias = fields.flag("attention_bias", default=False)
        # Independent of the head size.
        scale = 1 / math.sqrt(fields.number("query_pre_attn_scalar", default=_DEFAULT_QUERY_PRE_ATTN_SCALAR))

        def layer(index: int) -> GemmaLayer:
            attention = SelfAttention(
                config,
                index,
                parallel,
                qkv_bias=bias,
                output_bias=bias,
                scale=scale,
                sliding_window=windows[index],
                soft_cap=soft_cap,
                query_key_norm=query_key_norm,
            )
            return GemmaLayer(config, attention, parallel)

        model = DecoderModel(
            config,
            parallel,
            layer,
            ropes=ropes,
            embed_tokens=ScaledVocabEmbedding(
                config.vocab_size, config.hidden_size, scale=config.hidden_size**0.5, parallel=parallel
            ),
            norm=_norm(config),
        )
        super().__init__(config, parallel, model)
        self.logits_soft_cap = logits_soft_cap

    def compute_logits(self, hidden_LD: Tensor) -> Tensor:
        logits_LV = super().compute_logits(hidden_LD)
        if self.logits_soft_cap is None:
            return logits_LV
        return logits_LV.div_(self.logits_soft_cap).tanh_().mul_(self.logits_soft_cap)


def _norm(config: DecoderConfig) -> RMSNormRoundedLast:
    return RMSNormRoundedLast(config.hidden_size, config.norm_eps, weight_offset=NORM_WEIGHT_OFFSET)
