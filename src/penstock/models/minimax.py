"""MiniMax-Text-01 (MiniMax 2025, https://arxiv.org/abs/2501.08313): lightning attention and experts.

Suffixes: T tokens of the step, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.kernels.rotary import Rotation
from penstock.layers.norm import norm_of_stream
from penstock.layers.recurrence.lightning import QKV, LightningAttention, slopes
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.models.config_fields import FULL, LINEAR, ConfigFields, read_layer_kinds
from penstock.models.decoder import (
    ATTENTION_WEIGHTS,
    COMMON_WEIGHTS,
    DecoderConfig,
    DecoderLayer,
    DecoderModel,
    SelfAttention,
)
from penstock.models.minimax_m2 import read_rope_of_dimensions
from penstock.models.mixtral import MixtralForCausalLM
from penstock.models.mixtures import ExpertNames, MixtureForCausalLM, mixtures, read_routing
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

_DEFAULT_THETA = 1000000.0
_LAYER = "model.layers.*.self_attn"
# Tables of decays that follow from the configuration.
# Factors of the residual stream in configurations of the original format, by their names in that of Transformers.
_ORIGINAL_FACTORS = {
    "full_attn": "layernorm_full_attention",
    "linear_attn": "layernorm_linear_attention",
    "mlp": "layernorm_mlp",
}
_ORIGINAL_KINDS = {0: LINEAR, 1: FULL}
_DECAYS = r"model\.layers\.\d+\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)"


class MiniMaxLayer(DecoderLayer):
    """h = norm(x); x = alpha * h + beta * attention(h); then likewise with the MLP's norm and factors.

    factors: alpha and beta of attention, and of the MLP.
    """

    factors: tuple[float, float, float, float]

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        alpha, beta, mlp_alpha, mlp_beta = self.factors
        normed_TD, _ = norm_of_stream(self.input_layernorm, hidden_TD, residual_TD)
        mixed_TD = self.self_attn(normed_TD, rotation, context).mul_(beta)
        residual_TD = context.narrowed(normed_TD).mul_(alpha)
        normed_TD, _ = self.post_attention_layernorm.add_and_norm(mixed_TD, residual_TD)
        return self.feed_forward(normed_TD, context).mul_(mlp_beta), normed_TD.mul_(mlp_alpha)


class MiniMaxForCausalLM(MixtureForCausalLM):
    """Layers with lightning attention between layers with attention; experts in all, as Mixtral's."""

    weight_table: ClassVar[WeightTable] = COMMON_WEIGHTS
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = {
        FULL: ATTENTION_WEIGHTS,
        LINEAR: {
            f"{_LAYER}.qkv_proj": Into(f"{_LAYER}.qkv_proj", shard=QKV),
            **{f"{_LAYER}.{name}": Into(f"{_LAYER}.{name}") for name in ("output_gate", "norm", "out_proj")},
        },
    }
    expert_names: ClassVar[ExpertNames] = MixtralForCausalLM.expert_names
    ignorable = (*MixtureForCausalLM.ignorable, _DECAYS)

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields, rope=lambda head_size: self.read_rope(fields, head_size))
        kinds = self.read_kinds(fields, config.num_layers)
        fields.choice("hidden_act", ("silu", "swish"), "silu")
        window = fields.optional_integer("sliding_window")
        names = (FULL, "full_attn"), (LINEAR, "linear_attn")
        factors = {kind: self.read_factors(fields, name) for kind, name in names}
        of_mlp = self.read_factors(fields, "mlp")
        routing, layers = read_routing(fields, normalizes=True), list(range(config.num_layers))
        moe = mixtures(config, routing, config.intermediate_size, parallel, layers)

        def layer(index: int) -> MiniMaxLayer:
            mixer: LightningAttention | SelfAttention
            if kinds[index] == LINEAR:
                mixer = LightningAttention(
                    config.num_heads,
                    config.head_size,
                    config.hidden_size,
                    f"{_LAYER.replace('*', str(index))}.state",
                    parallel,
                    slopes_H=slopes(config.num_heads, index, config.num_layers),
                )
            else:
                mixer = SelfAttention(config, index, parallel, qkv_bias=False, output_bias=False, sliding_window=window)
            made = MiniMaxLayer(config, mixer, parallel, moe=moe(index))
            if isinstance(mixer, SelfAttention):
                # The norm's outputs go on as the residual stream too.
                mixer.qkv_proj.scalable_inputs = None
            made.factors = *factors[kinds[index]], *of_mlp
            return made

        super().__init__(config, parallel, DecoderModel(config, parallel, layer), layers, routing)
        self.layer_kinds = kinds

    @staticmethod
    def read_kinds(fields: ConfigFields, num_layers: int) -> Sequence[str]:
        """`FULL` or `LINEAR` for every layer."""
        default = [LINEAR if layer % 2 else FULL for layer in range(num_layers)]
        return read_layer_kinds(fields, default, allowed=(FULL, LINEAR))

    @staticmethod
    def read_rope(fields: ConfigFields, head_size: int) -> RopeParameters:
        """Rotary embedding of the layers with attention."""
        positions = fields.num_positions
        return read_rope_parameters(
            fields.hf_config, head_size=head_size, num_positions=positions, default_theta=_DEFAULT_THETA
        )

    @staticmethod
    def read_factors(fields: ConfigFields, name: str) -> tuple[float, float]:
        """Factors on the residual and on the output."""
        alpha, beta = (fields.number(f"{name}_{factor}_factor", default=1.0) for factor in ("alpha", "beta"))
        return float(alpha), float(beta)


class MiniMaxText01ForCausalLM(MiniMaxForCausalLM):
    """MiniMax-Text-01 with a configuration in its original format; a part of each head rotates."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        ConfigFields(model_config).refuse_others({"postnorm": True, "shared_intermediate_size": 0})
        super().__init__(model_config, parallel)

    @staticmethod
    def read_kinds(fields: ConfigFields, num_layers: int) -> Sequence[str]:
        types = fields.hf_config.get("attn_type_list")
        if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(_ORIGINAL_KINDS):
            allowed = f"a list of num_hidden_layers={num_layers} numbers, 0 (lightning attention) or 1"
            raise fields.unsupported("attn_type_list", types, allowed)
        return [_ORIGINAL_KINDS[one] for one in types]

    @staticmethod
    def read_rope(fields: ConfigFields, head_size: int) -> RopeParameters:
        return read_rope_of_dimensions(fields, head_size)

    @staticmethod
    def read_factors(fields: ConfigFields, name: str) -> tuple[float, float]:
        original = _ORIGINAL_FACTORS[name]
        alpha, beta = (fields.number(f"{original}_{factor}", default=1.0) for factor in ("alpha", "beta"))
        return float(alpha), float(beta)
