"""DeepSeek V2, V3 and R1 (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434 and https://arxiv.org/abs/2412.19437)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from penstock.config import ModelConfig
from penstock.layers.experts import MoE, Routing
from penstock.layers.latent_attention import LatentAttention, LatentAttentionSizes
from penstock.layers.rope_scaling import RopeParameters, attention_sharpening, read_rope_parameters
from penstock.layers.weights import Shard
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderLayer, DecoderModel
from penstock.models.glm4_moe import read_grouped_routing
from penstock.models.mixtures import SharedExpertsForCausalLM, mixtures, read_groups, read_routing
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

_GREEDY, _BEST_GROUPS = "greedy", "group_limited_greedy"


class DeepseekV2ForCausalLM(SharedExpertsForCausalLM):
    """Latent attention; experts after the first layers, chosen by a softmax, and shared ones."""

    has_correction = False

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config, sizes, has_bias = read_latent_attention(fields)
        routing = self._read_routing(fields)
        layers = self._moe_layers_of(fields, config.num_layers)
        moe = deepseek_experts(fields, config, routing, parallel, layers, has_correction=self.has_correction)

        def layer(index: int) -> DecoderLayer:
            attention = LatentAttention(sizes, config.hidden_size, index, parallel, bias=has_bias)
            return DecoderLayer(config, attention, parallel, moe=moe(index))

        super().__init__(config, parallel, DecoderModel(config, parallel, layer), layers, routing)
        self._has_query_latent = sizes.q_lora_rank is not None
        self.num_drafting = fields.count("num_nextn_predict_layers", default=0)
        self.has_shared = fields.count("n_shared_experts", default=0) > 0

    def _read_routing(self, fields: ConfigFields) -> Routing:
        fields.refuse_flags("norm_topk_prob", "mlp_bias")
        _refuse_scoring(fields, "softmax")
        method = fields.choice("topk_method", (_GREEDY, _BEST_GROUPS), _GREEDY)
        routing = replace(
            read_routing(fields, normalizes=False), scale=fields.number("routed_scaling_factor", default=1.0)
        )
        return read_groups(fields, routing) if method == _BEST_GROUPS else routing

    def _moe_layers_of(self, fields: ConfigFields, num_layers: int) -> list[int]:
        step = fields.integer("moe_layer_freq", default=1)
        if step != 1:
            raise fields.unsupported("moe_layer_freq", step, "1")
        return list(range(fields.count("first_k_dense_replace", default=0), num_layers))

    def modules_by_name(self) -> Mapping[str, tuple[nn.Module | None, Shard | None]]:
        """As `MixtureForCausalLM`; without `kv_b_proj`, which multiplies from both sides."""
        modules = super().modules_by_name()
        return {name: place for name, place in modules.items() if not name.endswith(".kv_b_proj")}

    def _table(self) -> WeightTable:
        table = {name: into for name, into in super()._table().items() if ".self_attn." not in name}
        layer = "model.layers.*"
        return {**table, **latent_weights(layer, layer, has_query_latent=self._has_query_latent)}


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek V3: V2 with experts chosen by sigmoids with a correction, of the best groups."""

    has_correction = True

    def _read_routing(self, fields: ConfigFields) -> Routing:
        _refuse_scoring(fields, "sigmoid")
        fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
        return read_grouped_routing(fields)


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash: as DeepSeek V3, with the experts' layers named one by one."""

    def _moe_layers_of(self, fields: ConfigFields, num_layers: int) -> list[int]:
        layers = read_sparse_layers(fields, num_layers)
        return super()._moe_layers_of(fields, num_layers) if layers is None else layers


def read_sparse_layers(fields: ConfigFields, num_layers: int) -> list[int] | None:
    """Layers with experts, named one by one in `mlp_layer_types`; None for an absent field."""
    kinds = fields.hf_config.get("mlp_layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise fields.unsupported("mlp_layer_types", kinds, f"a list of {num_layers} of dense and sparse")
    return [layer for layer, kind in enumerate(kinds) if kind == "sparse"]


def read_latent_attention(fields: ConfigFields) -> tuple[DecoderConfig, LatentAttentionSizes, bool]:
    """Read the layers' parameters, those of latent attention, and whether its projections have biases."""
    rotary_size = fields.integer("qk_rope_head_dim")
    rope = read_rope_parameters(fields.hf_config, head_size=rotary_size, num_positions=fields.num_positions)
    config = DecoderConfig.read(fields, default_head_size=rotary_size, rope=lambda _: rope)
    if config.num_kv_heads != config.num_heads:
        raise fields.unsupported("num_key_value_heads", config.num_kv_heads, f"{config.num_heads}, one for each head")
    nope_size = fields.integer("qk_nope_head_dim")
    sizes = LatentAttentionSizes(
        num_heads=config.num_heads,
        qk_nope_head_dim=nope_size,
        qk_rope_head_dim=rotary_size,
        v_head_dim=fields.integer("v_head_dim"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        scale=(nope_size + rotary_size) ** -0.5 * _sharpening(rope),
        rope_interleave=fields.flag("rope_interleave", default=True),
    )
    has_bias = fields.flag("attention_bias", default=False)
    if has_bias and sizes.q_lora_rank is None:
        raise fields.unsupported("attention_bias", True, "false where q_lora_rank is null")
    return config, sizes, has_bias


def deepseek_experts(
    fields: ConfigFields,
    config: DecoderConfig,
    routing: Routing,
    parallel: ParallelState,
    layers: list[int],
    *,
    has_correction: bool,
) -> Callable[[int], MoE | None]:
    """Function that makes the experts of a layer, or None for a layer with an MLP."""
    size = fields.integer("moe_intermediate_size")
    shared_size = size * fields.count("n_shared_experts", default=0)
    return mixtures(config, routing, size, parallel, layers, shared_size=shared_size, has_correction=has_correction)


def latent_weights(theirs: str, ours: str, *, has_query_latent: bool) -> WeightTable:
    """Weights of latent attention of a layer with these names in the checkpoint and in the model."""
    theirs, ours = f"{theirs}.self_attn", f"{ours}.self_attn"
    own = ["kv_a_layernorm", "kv_b_proj", "o_proj"] + ["q_a_layernorm", "q_b_proj"] * has_query_latent
    return {
        f"{theirs}.{'q_a_proj' if has_query_latent else 'q_proj'}": Into(f"{ours}.qkv_a_proj", shard="q"),
        f"{theirs}.kv_a_proj_with_mqa": Into(f"{ours}.qkv_a_proj", shard="kv"),
        **{f"{theirs}.{name}": Into(f"{ours}.{name}") for name in own},
    }


def _sharpening(rope: RopeParameters) -> float:
    """Factor of YaRN on the scores: the square of the one that `mscale_all_dim` asks for."""
    if rope.rope_type == "default" or not rope.settings.get("mscale_all_dim"):
        return 1.0
    return attention_sharpening(rope.number("factor"), rope.number("mscale_all_dim")) ** 2


def _refuse_scoring(fields: ConfigFields, scoring: str) -> None:
    fields.choice("scoring_func", (scoring,), scoring)
