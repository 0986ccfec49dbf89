"""Qwen3-Next and Qwen3.5 (Qwen team: 2025, https://qwen.ai/blog?id=qwen3-next; 2026, https://qwen.ai/blog?id=qwen3.5).

Three layers of four are gated DeltaNets, the others have attention with an output gate.
Suffixes: T tokens of the step, D hidden size, X features of several heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.kernels.recurrence import GateRule, gated_norm
from penstock.kernels.rotary import Rotation
from penstock.kernels.rows import columns
from penstock.layers.experts import MoE, Routing
from penstock.layers.norm import RoundedLastQueryKeyNorm, ZeroCentredRMSNorm
from penstock.layers.recurrence.gated_delta import (
    Arrangement,
    DeltaSizes,
    GatedDelta,
    by_key_head,
    convolved_together,
    one_by_one,
)
from penstock.layers.recurrence.state import output_rows
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.models.config_fields import FULL, LINEAR, ConfigFields, read_layer_kinds
from penstock.models.decoder import (
    ATTENTION_WEIGHTS,
    COMMON_WEIGHTS,
    DecoderConfig,
    DecoderForCausalLM,
    DecoderLayer,
    DecoderModel,
    SelfAttention,
)
from penstock.models.delta_fields import DEFAULT_NUM_TAPS, checked
from penstock.models.mixtures import mixtures, read_routing
from penstock.models.qwen import QUERY_KEY_NORMS
from penstock.models.qwen_moe import GatedSharedExpertForCausalLM, read_sparse_layers
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

# Defaults of absent fields.
_DEFAULT_HEAD_SIZE = 256
_DEFAULT_ROTARY_FACTOR = 0.25
_DEFAULT_INTERVAL = 4
_OUTPUT_GATE = GateRule(activation="sigmoid")
# Layers for more tokens, which `Qwen3NextMTP` has.
_MTP = r"mtp\..*"


class GatedSelfAttention(SelfAttention):
    """Attention whose output is multiplied by a sigmoid of a projection, element by element, before `o_proj`."""

    def __init__(self, config: DecoderConfig, layer: int, parallel: ParallelState, *, bias: bool) -> None:
        norm = partial(RoundedLastQueryKeyNorm, weight_offset=1.0)
        super().__init__(config, layer, parallel, qkv_bias=bias, output_bias=bias, query_key_norm=norm, has_gate=True)

    def forward(self, hidden_TD: Tensor, rotation: Rotation | None, context: ForwardContext) -> Tensor:
        rows_TX = self.qkv_proj(context.whole(hidden_TD), context.of_all_tokens())
        layer = self.attn.layer
        gate = layer.num_heads * layer.head_size
        qkv_TX = columns(rows_TX, gate, gate + 2 * layer.num_kv_heads * layer.head_size)
        mixed_TX = self.attn.from_projection(qkv_TX, self.query_key_norm, rotation, context)
        # The gate is before the queries.
        gate_TX = output_rows(rows_TX, context)
        gated_TX = gated_norm(mixed_TX, gate_TX, None, 0.0, _OUTPUT_GATE)
        return self.o_proj(gated_TX, context)  # type: ignore[no-any-return]


def delta_weights(**projections: str) -> WeightTable:
    """Weights of `GatedDelta` as `linear_attn`. projections: by name in the checkpoint, `in_proj` or `head_proj`."""
    theirs, ours = "model.layers.*.linear_attn", "model.layers.*.self_attn"
    return {
        theirs: Into(ours),
        **{f"{theirs}.{name}": Into(f"{ours}.{name}") for name in ("conv1d", "norm", "out_proj")},
        **{
            f"{theirs}.{name}": Into(f"{ours}.{module}", shard=name.removeprefix("in_proj_"))
            for name, module in projections.items()
        },
    }


GATED_ATTENTION: WeightTable = {**ATTENTION_WEIGHTS, **QUERY_KEY_NORMS}


class Qwen3NextForCausalLM(GatedSharedExpertForCausalLM):
    """Qwen3-Next: experts in all or some layers, with a gated one that all tokens share."""

    weight_table: ClassVar[WeightTable] = COMMON_WEIGHTS
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = {
        FULL: GATED_ATTENTION,
        LINEAR: delta_weights(in_proj_qkvz="in_proj", in_proj_ba="head_proj"),
    }
    ignorable = (*DecoderForCausalLM.ignorable, _MTP)

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config, kinds = read_config(fields), read_kinds(fields)
        has_experts = fields.count("num_experts", default=0) > 0
        routing = read_expert_routing(fields) if has_experts else None
        layers = read_sparse_layers(fields, config.num_layers) if has_experts else []
        moe = None if routing is None else read_experts(fields, config, parallel, routing, layers)
        layer = layer_maker(fields, config, parallel, kinds, arrangement=by_key_head, moe=moe)
        super().__init__(config, parallel, DecoderModel(config, parallel, layer), layers, routing)
        self.layer_kinds = kinds


_QWEN3_5: Mapping[str, WeightTable] = {
    FULL: GATED_ATTENTION,
    LINEAR: delta_weights(in_proj_qkv="in_proj", in_proj_z="in_proj", in_proj_b="head_proj", in_proj_a="head_proj"),
}


class Qwen3_5ForCausalLM(DecoderForCausalLM):  # noqa: N801
    """Qwen3.5 with MLPs."""

    weight_table: ClassVar[WeightTable] = COMMON_WEIGHTS
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = _QWEN3_5
    ignorable = (*DecoderForCausalLM.ignorable, _MTP)

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config, kinds = read_config(fields), read_kinds(fields)
        layer = layer_maker(fields, config, parallel, kinds, arrangement=convolved_together)
        super().__init__(config, parallel, DecoderModel(config, parallel, layer))
        self.layer_kinds = kinds


class Qwen3_5MoeForCausalLM(GatedSharedExpertForCausalLM):  # noqa: N801
    """Qwen3.5 with experts in every layer."""

    weight_table: ClassVar[WeightTable] = COMMON_WEIGHTS
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = _QWEN3_5
    ignorable = (*DecoderForCausalLM.ignorable, _MTP)

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config, kinds = read_config(fields, has_mlps=False), read_kinds(fields)
        routing, layers = read_expert_routing(fields), list(range(config.num_layers))
        moe = read_experts(fields, config, parallel, routing, layers)
        layer = layer_maker(fields, config, parallel, kinds, arrangement=convolved_together, moe=moe)
        super().__init__(config, parallel, DecoderModel(config, parallel, layer), layers, routing)
        self.layer_kinds = kinds


def read_config(fields: ConfigFields, *, has_mlps: bool = True) -> DecoderConfig:
    """Read the layers' common parameters. has_mlps: whether a layer may have an MLP instead of experts."""
    # Absent ones would have defaults of their own.
    for name in ("num_key_value_heads", "rms_norm_eps"):
        fields.number(name)
    config = DecoderConfig.read(
        fields,
        default_head_size=_DEFAULT_HEAD_SIZE,
        intermediate_size=None if has_mlps else fields.integer("moe_intermediate_size"),
        rope=partial(_read_rope, fields),
    )
    return replace(config, norm=ZeroCentredRMSNorm)


def _read_rope(fields: ConfigFields, head_size: int) -> RopeParameters:
    hf_config = {"partial_rotary_factor": _DEFAULT_ROTARY_FACTOR, **fields.hf_config}
    return read_rope_parameters(hf_config, head_size=head_size, num_positions=fields.num_positions, may_be_partial=True)


def read_kinds(fields: ConfigFields) -> list[str]:
    """`FULL` or `LINEAR` for every layer."""
    num_layers = fields.integer("num_hidden_layers")
    interval = fields.integer("full_attention_interval", default=_DEFAULT_INTERVAL)
    default = [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    return read_layer_kinds(fields, default, allowed=(FULL, LINEAR))


def read_expert_routing(fields: ConfigFields) -> Routing:
    return read_routing(fields, normalizes=fields.flag("norm_topk_prob", default=True))


def read_experts(
    fields: ConfigFields, config: DecoderConfig, parallel: ParallelState, routing: Routing, layers: list[int]
) -> Callable[[int], MoE | None]:
    """Function that makes the experts of a layer, or None for a layer with an MLP."""
    size, shared_size = fields.integer("moe_intermediate_size"), fields.integer("shared_expert_intermediate_size")
    return mixtures(config, routing, size, parallel, layers, shared_size=shared_size, gates_shared=True)


def layer_maker(
    fields: ConfigFields,
    config: DecoderConfig,
    parallel: ParallelState,
    kinds: Sequence[str],
    *,
    arrangement: Arrangement = one_by_one,
    moe: Callable[[int], MoE | None] | None = None,
) -> Callable[[int], DecoderLayer]:
    """Function that makes a layer of its kind from its number. arrangement: as of `GatedDelta`."""
    sizes = read_delta_sizes(fields) if LINEAR in kinds else None
    bias = fields.flag("attention_bias", default=False)

    def layer(index: int) -> DecoderLayer:
        mixer: GatedDelta | GatedSelfAttention
        if kinds[index] == FULL:
            mixer = GatedSelfAttention(config, index, parallel, bias=bias)
        else:
            assert sizes is not None, "read for layers of this kind"
            name = f"model.layers.{index}.linear_attn"
            mixer = GatedDelta(sizes, config.hidden_size, name, parallel, arrangement=arrangement)
        return DecoderLayer(config, mixer, parallel, moe=None if moe is None else moe(index))

    return layer


def read_delta_sizes(fields: ConfigFields) -> DeltaSizes:
    """Sizes of gated DeltaNets; raises as `checked`."""
    return checked(
        fields,
        DeltaSizes(
            num_key_heads=fields.integer("linear_num_key_heads"),
            num_value_heads=fields.integer("linear_num_value_heads"),
            key_size=fields.integer("linear_key_head_dim"),
            value_size=fields.integer("linear_value_head_dim"),
            num_taps=fields.integer("linear_conv_kernel_dim", default=DEFAULT_NUM_TAPS),
            norm_eps=fields.number("rms_norm_eps"),
        ),
    )
