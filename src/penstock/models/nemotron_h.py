"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NVIDIA 2025, https://arxiv.org/abs/2504.03624).

Layers of one part each: Mamba 2, attention without positions, an MLP, or experts. Suffixes: T tokens of the step, D
hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.kernels.activation import ACTIVATIONS
from penstock.kernels.rotary import Rotation
from penstock.layers.experts import MoE, Routing
from penstock.layers.mlp import PlainMLP
from penstock.layers.norm import RMSNormRoundedLast, norm_of_stream
from penstock.layers.recurrence.state_space import StateSpace, StateSpaceMixer
from penstock.models.config_fields import FULL, ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderModel, SelfAttention
from penstock.models.glm4_moe import read_grouped_routing
from penstock.models.mamba2 import MixerLayer
from penstock.models.mamba_fields import STATE_SPACE, checked, read_hybrid_kinds, state_space_weights
from penstock.models.mixtures import ExpertNames, MixtureForCausalLM, expert_weights
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

MLP, MIXTURE = "mlp", "moe"
_KINDS = {"mamba": STATE_SPACE, "attention": FULL, **{kind: kind for kind in (STATE_SPACE, FULL, MLP, MIXTURE)}}
_PATTERN = {"M": STATE_SPACE, "*": FULL, "-": MLP, "E": MIXTURE}
# Projections between hidden states and experts, by their names in checkpoints.
_LATENT = {"fc1_latent_proj": "to_latent", "fc2_latent_proj": "from_latent"}


class FeedForwardLayer(MixerLayer):
    """x + mlp(norm(x)), with an MLP or experts."""

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        hidden_TD, residual_TD = norm_of_stream(self.norm, hidden_TD, residual_TD)
        hidden_TD, residual_TD = context.narrowed(hidden_TD), context.narrowed(residual_TD)
        return self.mixer(hidden_TD, context), residual_TD


class NemotronHForCausalLM(MixtureForCausalLM):
    """State-space layers, MLPs or experts, and attention in a few layers."""

    weight_table: ClassVar[WeightTable] = {
        "model.embeddings": Into("model.embed_tokens"),
        "model.layers.*.norm": Into("model.layers.*.norm"),
        "model.norm_f": Into("model.norm"),
        "lm_head": Into("lm_head"),
    }
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = {
        FULL: {
            "model.layers.*.mixer.q_proj": Into("model.layers.*.mixer.qkv_proj", shard="q"),
            "model.layers.*.mixer.k_proj": Into("model.layers.*.mixer.qkv_proj", shard="k"),
            "model.layers.*.mixer.v_proj": Into("model.layers.*.mixer.qkv_proj", shard="v"),
            "model.layers.*.mixer.o_proj": Into("model.layers.*.mixer.o_proj"),
        },
        STATE_SPACE: state_space_weights("model.layers.*.mixer", "model.layers.*.mixer"),
        MLP: {
            "model.layers.*.mixer.up_proj": Into("model.layers.*.mixer.up_proj"),
            "model.layers.*.mixer.down_proj": Into("model.layers.*.mixer.down_proj"),
        },
    }
    expert_names: ClassVar[ExpertNames] = ExpertNames("mixer", gate_proj=None, stacked_block="mixer")
    # Layers for drafting more tokens.
    ignorable: ClassVar[tuple[str, ...]] = (*DecoderForCausalLM.ignorable, r"mtp\..*")

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        kinds = _read_kinds(fields)
        config = _read_config(fields, kinds)
        sizes = _read_sizes(fields, config)
        activation = fields.choice("mlp_hidden_act", ACTIVATIONS, "relu2")
        mlp_bias = fields.flag("mlp_bias", default=False)
        layers = [index for index, kind in enumerate(kinds) if kind == MIXTURE]
        routing = read_grouped_routing(fields) if layers else None
        self.expert_inputs = fields.optional_integer("moe_latent_size") if layers else None

        def layer(index: int) -> MixerLayer:
            norm = RMSNormRoundedLast(config.hidden_size, config.norm_eps)
            if kinds[index] == FULL:
                attention = SelfAttention(config, index, parallel, qkv_bias=False, output_bias=False)
                return MixerLayer(norm, attention)
            if kinds[index] == MLP:
                widths = config.hidden_size, config.intermediate_size
                return FeedForwardLayer(
                    norm, PlainMLP(*widths, activation=activation, bias=mlp_bias, parallel=parallel)
                )
            if kinds[index] == MIXTURE and routing is not None:
                return FeedForwardLayer(norm, _read_experts(fields, config, routing, activation, mlp_bias, parallel))
            name = f"model.layers.{index}.mixer"
            return MixerLayer(norm, StateSpaceMixer(config.hidden_size, sizes, name=name, parallel=parallel))

        norm = RMSNormRoundedLast(config.hidden_size, config.norm_eps)
        super().__init__(config, parallel, DecoderModel(config, parallel, layer, norm=norm), layers, routing)
        self.layer_kinds = kinds

    def checkpoint_name(self, name: str) -> str:
        """Checkpoints call the model its backbone."""
        return f"model.{name.removeprefix('backbone.')}" if name.startswith("backbone.") else name

    def tied_weights(self) -> Mapping[str, str]:
        return {"lm_head.weight": "model.embeddings.weight"} if self.config.tie_word_embeddings else {}

    def _expert_table(self, layer: int) -> WeightTable:
        assert self._routing is not None, "layers with experts have a routing"
        name = f"model.layers.{layer}.mixer"
        table = dict(expert_weights(name, name, self._routing.num_experts, self.expert_names))
        shared = {part: Into(f"{name}.shared_expert.{part}") for part in ("up_proj", "down_proj")}
        table |= {f"{name}.shared_experts.{part}": into for part, into in shared.items()}
        if self.expert_inputs is not None:
            table |= {f"{name}.{theirs}": Into(f"{name}.{ours}") for theirs, ours in _LATENT.items()}
        return table


def _read_experts(
    fields: ConfigFields, config: DecoderConfig, routing: Routing, activation: str, bias: bool, parallel: ParallelState
) -> MoE:
    """Experts of a layer. bias: of what all tokens take."""
    return MoE(
        config.hidden_size,
        fields.integer("moe_intermediate_size", default=7688),
        routing,
        activation=activation,
        parallel=parallel,
        shared_size=fields.integer("moe_shared_expert_intermediate_size", default=7688),
        shared_bias=bias,
        has_correction=True,
        are_gated=False,
        latent_size=fields.optional_integer("moe_latent_size"),
    )


def _read_kinds(fields: ConfigFields) -> Sequence[str]:
    """Kind of each layer, of a list or of `hybrid_override_pattern`, a letter per layer."""
    listed = fields.hf_config.get("layer_types") or fields.hf_config.get("layers_block_type")
    if listed is not None:
        kinds = read_hybrid_kinds(fields, len(listed) if isinstance(listed, list) else 0, _KINDS)
        assert kinds is not None, "the field is there"
        return kinds
    pattern = fields.hf_config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern or not set(pattern) <= set(_PATTERN):
        raise fields.unsupported("hybrid_override_pattern", pattern, f"a text of {', '.join(_PATTERN)}, one per layer")
    return [_PATTERN[letter] for letter in pattern]


def _read_config(fields: ConfigFields, kinds: Sequence[str]) -> DecoderConfig:
    fields.refuse_unsupported()
    num_heads = fields.integer("num_attention_heads", default=32)
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size", default=21504) if MLP in kinds else 0,
        num_layers=len(kinds),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=num_heads),
        head_size=fields.integer("head_dim", default=128),
        activation="relu2",
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        rope=None,
        norm=RMSNormRoundedLast,
    )


def _read_sizes(fields: ConfigFields, config: DecoderConfig) -> StateSpace:
    fields.choice("mamba_hidden_act", ("silu", "swish"), "silu")
    bias = fields.flag("use_bias", default=False)
    num_heads, head_size = fields.integer("mamba_num_heads", default=128), fields.integer("mamba_head_dim", default=64)
    sizes = StateSpace(
        num_heads=num_heads,
        head_size=head_size,
        num_groups=_either(fields, "n_groups", "mamba_n_groups", 8),
        state_size=fields.integer("ssm_state_size", default=128),
        kernel_size=_either(fields, "conv_kernel", "mamba_d_conv", 4),
        # As in Transformers: the limits of the configuration are not those of its layers.
        min_step=fields.number("mamba_dt_min", default=fields.number("time_step_min", default=0.001)),
        bias=bias,
        output_bias=bias,
        convolution_bias=fields.flag("mamba_conv_bias", default=fields.flag("use_conv_bias", default=True)),
        norm_eps=config.norm_eps,
    )
    return checked(fields, num_heads * head_size, sizes)


def _either(fields: ConfigFields, name: str, other_name: str, default: int) -> int:
    """A field that some configurations have under another name, which Transformers prefers."""
    return fields.integer(other_name, default=fields.integer(name, default=default))
