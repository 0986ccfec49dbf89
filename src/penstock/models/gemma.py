"""Gemma 2 and the text model of Gemma 3 (Gemma team: 2024, https://arxiv.org/abs/2408.00118; 2025, arXiv:2503.19786).

They share norms before and after attention and MLP, scaled embeddings, and capped logits.
Suffixes: T tokens of the step, L logits rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.kernels.rotary import Rotation
from penstock.layers.embedding import ScaledVocabEmbedding
from penstock.layers.mlp import GatedMLP
from penstock.layers.norm import RMSNormRoundedLast, RoundedLastQueryKeyNorm, norm_of_stream
from penstock.layers.rope_scaling import RopeParameters
from penstock.layers.scalable_inputs import outputs_of
from penstock.models.config_fields import FULL, SLIDING, ConfigFields, read_layer_kinds, windows_of
from penstock.models.decoder import (
    DECODER_WEIGHTS,
    AttentionNorm,
    DecoderConfig,
    DecoderForCausalLM,
    DecoderModel,
    SelfAttention,
)
from penstock.models.layer_ropes import read_rope_of_kind
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

# Stored norm weights are offsets from 1.
NORM_WEIGHT_OFFSET = 1.0
# Default of an absent field.
_DEFAULT_HEAD_SIZE = 256
_DEFAULT_QUERY_PRE_ATTN_SCALAR = 256
_DEFAULT_WINDOW = 4096


def _is_bidirectional(fields: ConfigFields) -> bool:
    """Whether an embedding model's attention is in both directions."""
    pooling = fields.model_config.pooling
    return pooling is not None and not pooling.is_causal


def read_gemma_config(fields: ConfigFields, rope: Callable[[int], RopeParameters] | None = None) -> DecoderConfig:
    """Read the configuration. rope: as in `DecoderConfig.read`."""
    if not _is_bidirectional(fields):
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
        self_attn.qkv_proj.scalable_inputs = outputs_of(self.input_layernorm)
        self.mlp.gate_up_proj.scalable_inputs = outputs_of(self.pre_feedforward_layernorm)

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        hidden_TD, residual_TD = norm_of_stream(self.input_layernorm, hidden_TD, residual_TD)
        hidden_TD = self.post_attention_layernorm(self.self_attn(hidden_TD, rotation, context))
        residual_TD = context.narrowed(residual_TD)
        hidden_TD, residual_TD = self.pre_feedforward_layernorm.add_and_norm(hidden_TD, residual_TD)
        return self.post_feedforward_layernorm(self.mlp(hidden_TD, context)), residual_TD


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
        ropes: Sequence[RopeParameters | None] | None = None,
    ) -> None:
        window = fields.optional_integer("sliding_window", default=_DEFAULT_WINDOW)
        if _is_bidirectional(fields) and window is not None:
            # The window of the configuration reaches to both sides.
            window = window // 2 + 1
        windows = windows_of(fields, kinds, window)
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

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        logits_LV = super().compute_logits(hidden_LD, context)
        if self.logits_soft_cap is None:
            return logits_LV
        return logits_LV.div_(self.logits_soft_cap).tanh_().mul_(self.logits_soft_cap)


def _norm(config: DecoderConfig) -> RMSNormRoundedLast:
    return RMSNormRoundedLast(config.hidden_size, config.norm_eps, weight_offset=NORM_WEIGHT_OFFSET)


# Default of an absent field; null means no cap.
_DEFAULT_ATTENTION_SOFT_CAP = 50.0
_DEFAULT_LOGITS_SOFT_CAP = 30.0


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Gemma's decoder with soft caps on scores and logits, and a sliding window in every second layer."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = read_gemma_config(fields)
        alternating = [FULL if layer % 2 else SLIDING for layer in range(config.num_layers)]
        kinds = read_layer_kinds(fields, default=alternating)
        super().__init__(
            fields,
            config,
            parallel,
            kinds,
            soft_cap=fields.optional_number("attn_logit_softcapping", default=_DEFAULT_ATTENTION_SOFT_CAP),
            logits_soft_cap=fields.optional_number("final_logit_softcapping", default=_DEFAULT_LOGITS_SOFT_CAP),
        )


# Default of an absent field.
_DEFAULT_PATTERN = 6
# Old field of the rotary base and its default, by attention type.
_THETA = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}


class Gemma3ForCausalLM(GemmaForCausalLM):
    """Gemma's decoder with query and key norms, and two attention types.

    Most layers have a sliding window and a small rotary base; every sixth has full attention and a large base.
    """

    weight_table: ClassVar[WeightTable] = {
        **GemmaForCausalLM.weight_table,
        "model.layers.*.self_attn.q_norm": Into("model.layers.*.self_attn.query_key_norm", shard="q"),
        "model.layers.*.self_attn.k_norm": Into("model.layers.*.self_attn.query_key_norm", shard="k"),
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = read_gemma_config(fields, rope=partial(read_rope_of_kind, fields, FULL, _THETA))
        pattern = fields.integer("sliding_window_pattern", default=_DEFAULT_PATTERN)
        patterned = [SLIDING if (layer + 1) % pattern else FULL for layer in range(config.num_layers)]
        kinds = read_layer_kinds(fields, default=patterned)
        ropes = {FULL: config.rope, SLIDING: read_rope_of_kind(fields, SLIDING, _THETA, config.head_size)}
        if fields.optional_number("attn_logit_softcapping") is not None:
            raise fields.unsupported(
                "attn_logit_softcapping", fields.hf_config["attn_logit_softcapping"], "null, as in all Gemma 3 models"
            )

        super().__init__(
            fields,
            config,
            parallel,
            kinds,
            query_key_norm=partial(RoundedLastQueryKeyNorm, weight_offset=NORM_WEIGHT_OFFSET),
            logits_soft_cap=fields.optional_number("final_logit_softcapping"),
            ropes=[ropes[kind] for kind in kinds],
        )
