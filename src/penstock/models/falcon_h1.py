"""Falcon-H1 (TII 2025, https://arxiv.org/abs/2507.22448): attention and Mamba 2 side by side in every layer.

Suffixes: T tokens of the step, L logits rows, D hidden size, X features of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.errors import ModelError
from penstock.kernels.rotary import Rotation
from penstock.kernels.rows import sum_rows
from penstock.layers.embedding import ScaledVocabEmbedding
from penstock.layers.mlp import GatedMLP
from penstock.layers.norm import RMSNorm, norm_of_stream
from penstock.layers.recurrence.state_space import StateSpace, StateSpaceMixer
from penstock.models.bamba import common_weights
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import ATTENTION_WEIGHTS, DecoderConfig, DecoderForCausalLM, DecoderModel, SelfAttention
from penstock.models.mamba_fields import read_state_space, state_space_weights
from penstock.models.weights import WeightTable
from penstock.parallel import ParallelState


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Factors on what enters and leaves the parts of a layer (muP).

    state_space: on the projections z, x, B, C and dt. mlp: on the gate before its activation, and on the output.
    """

    attention_in: float
    attention_out: float
    key: float
    state_space_in: float
    state_space_out: float
    state_space: tuple[float, ...]
    mlp: tuple[float, ...]

    @classmethod
    def read(cls, fields: ConfigFields) -> Multipliers:
        """Raises ModelError for invalid fields."""
        return cls(
            attention_in=fields.number("attention_in_multiplier", default=1.0),
            attention_out=fields.number("attention_out_multiplier", default=1.0),
            key=fields.number("key_multiplier", default=1.0),
            state_space_in=fields.number("ssm_in_multiplier", default=1.0),
            state_space_out=fields.number("ssm_out_multiplier", default=1.0),
            state_space=_numbers(fields, "ssm_multipliers", 5),
            mlp=_numbers(fields, "mlp_multipliers", 2),
        )


class ScaledGatedMLP(GatedMLP):
    """down(activation(gate_factor * gate(x)) * up(x))."""

    gate_factor = 1.0

    def activated(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        if self.gate_factor == 1.0:
            return super().activated(hidden_TD, context)
        # Both halves of the projection are multiplied, and the product of the second one divided again.
        gate_up_TX = self.gate_up_proj(hidden_TD, context).mul_(self.gate_factor)
        return self._activate_and_mul(gate_up_TX).mul_(1 / self.gate_factor)


class FalconH1Layer(nn.Module):
    """x + state_space(norm(x)) + attention(norm(x)), then x + mlp(norm(x)), with factors on all of them."""

    def __init__(
        self,
        config: DecoderConfig,
        attention: SelfAttention,
        state_space: StateSpaceMixer,
        multipliers: Multipliers,
        parallel: ParallelState,
        *,
        mlp_bias: bool,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mamba, self.self_attn, self.factors = state_space, attention, multipliers
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        sizes = config.hidden_size, config.intermediate_size
        self.mlp = ScaledGatedMLP(*sizes, activation=config.activation, bias=mlp_bias, parallel=parallel)
        self.mlp.gate_factor = multipliers.mlp[0]

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        factors = self.factors
        hidden_TD, residual_TD = norm_of_stream(self.input_layernorm, hidden_TD, residual_TD)
        # The recurrence comes before attention, which leaves last tokens alone.
        begun = self.mamba.begin(_scaled(hidden_TD, factors.state_space_in), context)
        attended_TD = self.self_attn(_scaled(hidden_TD, factors.attention_in), rotation, context)
        mixed_TD = self.mamba.finish(*begun, context).mul_(factors.state_space_out)
        mixed_TD = sum_rows(mixed_TD, attended_TD.mul_(factors.attention_out))
        residual_TD = context.narrowed(residual_TD)
        hidden_TD, residual_TD = self.post_attention_layernorm.add_and_norm(mixed_TD, residual_TD)
        return self.mlp(hidden_TD, context).mul_(factors.mlp[1]), residual_TD


class FalconH1ForCausalLM(DecoderForCausalLM):
    """Attention and a state-space layer side by side, before an MLP."""

    weight_table: ClassVar[WeightTable] = {
        **common_weights(),
        **ATTENTION_WEIGHTS,
        **state_space_weights("model.layers.*.mamba", "model.layers.*.mamba"),
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config, multipliers = DecoderConfig.read(fields), Multipliers.read(fields)
        sizes = _read_sizes(fields, config, multipliers)
        attention_bias, mlp_bias = [fields.flag(name, default=False) for name in ("attention_bias", "mlp_bias")]

        def layer(index: int) -> FalconH1Layer:
            # Keys are cached without their factor, which is one of the scores.
            attention = SelfAttention(
                config,
                index,
                parallel,
                qkv_bias=attention_bias,
                output_bias=attention_bias,
                scale=config.head_size**-0.5 * multipliers.key,
            )
            name = f"model.layers.{index}.mamba"
            state_space = StateSpaceMixer(config.hidden_size, sizes, name=name, parallel=parallel)
            return FalconH1Layer(config, attention, state_space, multipliers, parallel, mlp_bias=mlp_bias)

        embed_tokens = ScaledVocabEmbedding(
            config.vocab_size,
            config.hidden_size,
            scale=float(fields.number("embedding_multiplier", default=1.0)),
            parallel=parallel,
        )
        super().__init__(config, parallel, DecoderModel(config, parallel, layer, embed_tokens=embed_tokens))
        self._head_factor = fields.number("lm_head_multiplier", default=1.0)

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        return super().compute_logits(hidden_LD, context).mul_(self._head_factor)


def _read_sizes(fields: ConfigFields, config: DecoderConfig, multipliers: Multipliers) -> StateSpace:
    sizes = read_state_space(
        fields, config.hidden_size, config.norm_eps, fields.optional_integer("mamba_d_ssm", default=1024)
    )
    return replace(
        sizes,
        output_bias=fields.flag("projectors_bias", default=False),
        has_norm=fields.flag("mamba_rms_norm", default=False),
        gates_first=not fields.flag("mamba_norm_before_gate", default=True),
        gate_scale=multipliers.state_space[0],
        input_scales=multipliers.state_space[1:4],
        step_scale=multipliers.state_space[4],
    )


def _numbers(fields: ConfigFields, name: str, length: int) -> tuple[float, ...]:
    """A list of so many numbers; ones for an absent field."""
    values = fields.hf_config.get(name) or [1.0] * length
    are_numbers = isinstance(values, list) and all(isinstance(one, (int, float)) for one in values)
    if not are_numbers or len(values) != length:
        raise ModelError(f"{fields.source} has {name}={values!r}. It must be a list of {length} numbers.")
    return tuple(map(float, values))


def _scaled(hidden_TD: Tensor, factor: float) -> Tensor:
    """A multiple of rows that others still read."""
    return hidden_TD if factor == 1.0 else sum_rows(hidden_TD, None).mul_(factor)
