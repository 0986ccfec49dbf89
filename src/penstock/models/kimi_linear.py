"""Kimi Linear (Kimi team 2025, https://arxiv.org/abs/2510.26692): Kimi Delta Attention between latent attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from penstock.config import ModelConfig
from penstock.layers.experts import SIGMOID, Routing
from penstock.layers.latent_attention import LatentAttention, LatentAttentionSizes
from penstock.layers.recurrence.channel_delta import ChannelDelta
from penstock.layers.weights import Shard
from penstock.models.config_fields import FULL, LINEAR, ConfigFields, read_layer_kinds
from penstock.models.decoder import COMMON_WEIGHTS, DecoderConfig, DecoderLayer, DecoderModel
from penstock.models.deepseek import latent_weights, read_sparse_layers
from penstock.models.delta_fields import DEFAULT_NUM_TAPS, SplitConvolutions
from penstock.models.mixtures import (
    ExpertNames,
    SharedExpertsForCausalLM,
    expert_weights,
    gated_mlp,
    mixtures,
    read_groups,
    read_routing,
)
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

_LAYER = "model.layers.*"
_MIXER = f"{_LAYER}.self_attn"
_KIMI_DELTA: WeightTable = {
    _MIXER: Into(_MIXER),
    **{f"{_MIXER}.{one}_proj": Into(f"{_MIXER}.in_proj", shard=one) for one in "qkv"},
    **{
        f"{_MIXER}.{name}": Into(f"{_MIXER}.{name}")
        for name in ("b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "conv1d")
    },
    f"{_MIXER}.o_norm": Into(f"{_MIXER}.norm"),
    f"{_MIXER}.o_proj": Into(f"{_MIXER}.out_proj"),
}
_DEFAULT_INTERVAL = 4
# Fields of published configurations that say how other models differ, with the value implemented here.
_FIXED = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "q_lora_rank": None}


class KimiLinearForCausalLM(SharedExpertsForCausalLM):
    """Latent attention without positions in one layer of four; experts after the first layers, and shared ones."""

    weight_table: ClassVar[WeightTable] = COMMON_WEIGHTS
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = {
        FULL: latent_weights(_LAYER, _LAYER, has_query_latent=False),
        LINEAR: _KIMI_DELTA,
    }
    expert_names: ClassVar[ExpertNames] = ExpertNames("block_sparse_moe", "w1", "w3", "w2")

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        fields.refuse_others(_FIXED)
        fields.choice("hidden_act", ("silu", "swish"), "silu")
        fields.refuse_flags("attention_bias")
        config = DecoderConfig.read(fields, rope=lambda _: None)
        kinds, routing = _read_kinds(fields, config.num_layers), _read_routing(fields)
        num_heads, head_size, num_taps = _read_delta_sizes(fields)
        layers, size = _read_moe_layers(fields, config.num_layers), fields.integer("moe_intermediate_size")
        num_shared = fields.count("num_shared_experts", default=0)
        moe = mixtures(config, routing, size, parallel, layers, shared_size=size * num_shared, has_correction=True)
        sizes = _read_latent_sizes(fields, config)

        def layer(index: int) -> DecoderLayer:
            mixer: nn.Module
            if kinds[index] == FULL:
                mixer = LatentAttention(sizes, config.hidden_size, index, parallel, bias=False)
            else:
                mixer = ChannelDelta(
                    num_heads,
                    head_size,
                    config.hidden_size,
                    f"model.layers.{index}.self_attn.state",
                    parallel,
                    num_taps=num_taps,
                    norm_eps=config.norm_eps,
                )
            return DecoderLayer(config, mixer, parallel, moe=moe(index))

        super().__init__(config, parallel, DecoderModel(config, parallel, layer), layers, routing)
        self.layer_kinds = kinds
        self.has_shared = num_shared > 0
        self.num_drafting = fields.count("num_nextn_predict_layers", default=0)
        self._convolutions = SplitConvolutions()

    def modules_by_name(self) -> Mapping[str, tuple[nn.Module | None, Shard | None]]:
        """As `MixtureForCausalLM`; without `kv_b_proj`, which multiplies from both sides."""
        modules = super().modules_by_name()
        return {name: place for name, place in modules.items() if not name.endswith(".kv_b_proj")}

    def checkpoint_name(self, name: str) -> str:
        """Transformers saves the MLPs of layers without experts as if they were such."""
        for projection in ("gate_proj", "up_proj", "down_proj"):
            name = name.replace(f".block_sparse_moe.{projection}.", f".mlp.{projection}.")
        return name

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for own_name, piece in super().pieces(name, tensor):
            yield from self._convolutions.joined(own_name, piece)

    def joins(self, name: str) -> bool:
        return self._convolutions.has(self.checkpoint_name(name))

    def _expert_table(self, layer: int) -> WeightTable:
        theirs, ours = f"model.layers.{layer}.{self.expert_names.block}", f"model.layers.{layer}.mlp"
        assert self._routing is not None, "layers with experts have a routing"
        shared = gated_mlp(f"{theirs}.shared_experts", f"{ours}.shared_expert", ExpertNames())
        table = expert_weights(theirs, ours, self._routing.num_experts, self.expert_names)
        return {**table, **dict(shared if self.has_shared else ())}


def _read_kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """`FULL` or `LINEAR` for every layer: of `layer_types`, or of the lists in `linear_attn_config`, from 1 on."""
    default = [FULL if layer and layer % _DEFAULT_INTERVAL == 0 else LINEAR for layer in range(num_layers)]
    if fields.hf_config.get("linear_attn_config") is not None:
        lists = fields.section("linear_attn_config").hf_config
        full, linear = lists.get("full_attn_layers"), lists.get("kda_layers")
        if (
            not isinstance(full, list)
            or not isinstance(linear, list)
            or {*full, *linear} != {*range(1, num_layers + 1)}
        ):
            raise fields.unsupported(
                "linear_attn_config", dict(lists), f"full_attn_layers and kda_layers of {num_layers} layers, from 1 on"
            )
        default = [FULL if layer + 1 in full else LINEAR for layer in range(num_layers)]
    return read_layer_kinds(fields, default, allowed=(FULL, LINEAR))


def _read_delta_sizes(fields: ConfigFields) -> tuple[int, int, int]:
    """Heads, their size and taps of the convolution, in `linear_attn_config` or as Transformers writes them."""
    if fields.hf_config.get("linear_attn_config") is None:
        heads, size = fields.integer("linear_num_heads"), fields.integer("linear_head_dim")
        return heads, size, fields.integer("linear_conv_kernel_dim", default=DEFAULT_NUM_TAPS)
    section = fields.section("linear_attn_config")
    taps = section.integer("short_conv_kernel_size", default=DEFAULT_NUM_TAPS)
    return section.integer("num_heads"), section.integer("head_dim"), taps


def _read_routing(fields: ConfigFields) -> Routing:
    """Sigmoid routing with a correction for the choice, of the best groups of experts."""
    normalizes = fields.flag("moe_renormalize", default=True)
    routing = read_routing(fields, normalizes=normalizes, of_token="num_experts_per_token")
    routing = replace(routing, scoring=SIGMOID, scale=fields.number("routed_scaling_factor", default=1.0))
    return read_groups(fields, routing, best_of_group=2, of_groups="num_expert_group")


def _read_moe_layers(fields: ConfigFields, num_layers: int) -> list[int]:
    layers = read_sparse_layers(fields, num_layers)
    return list(range(fields.count("first_k_dense_replace", default=1), num_layers)) if layers is None else layers


def _read_latent_sizes(fields: ConfigFields, config: DecoderConfig) -> LatentAttentionSizes:
    nope_size, shared_size = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    return LatentAttentionSizes(
        num_heads=config.num_heads,
        qk_nope_head_dim=nope_size,
        qk_rope_head_dim=shared_size,
        v_head_dim=fields.integer("v_head_dim"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        q_lora_rank=None,
        scale=(nope_size + shared_size) ** -0.5,
        rope_interleave=False,
    )
