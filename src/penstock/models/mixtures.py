"""Decoders with mixtures of experts: Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088), Qwen2-MoE and
Qwen3-MoE (Qwen team 2024, arXiv:2407.10671; 2025, arXiv:2505.09388), OLMoE (Muennighoff et al. 2024, arXiv:2409.02060).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from penstock.config import ModelConfig
from penstock.errors import ModelError
from penstock.layers.experts import MoE, Routing
from penstock.layers.norm import QueryKeyNorm
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import (
    DECODER_WEIGHTS,
    DecoderConfig,
    DecoderForCausalLM,
    DecoderModel,
    plain_decoder,
)
from penstock.models.olmo2 import whole_query_key_norm
from penstock.models.qwen import QUERY_KEY_NORMS, read_qwen_windows
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture's modules in checkpoints.

    block: of the mixture in its layer. gate_proj, up_proj, down_proj: of an expert.
    """

    block: str = "mlp"
    gate_proj: str = "gate_proj"
    up_proj: str = "up_proj"
    down_proj: str = "down_proj"


class MixtureForCausalLM(DecoderForCausalLM):
    """A decoder in which some layers have experts instead of the MLP. expert_names: as in checkpoints."""

    expert_names: ClassVar[ExpertNames] = ExpertNames()

    def __init__(
        self,
        config: DecoderConfig,
        parallel: ParallelState,
        model: DecoderModel,
        moe_layers: list[int],
        routing: Routing,
    ) -> None:
        super().__init__(config, parallel, model)
        self._moe_layers, self._num_experts = moe_layers, routing.num_experts

    def _table(self) -> WeightTable:
        mlps = {name: into for name, into in super()._table().items() if ".mlp." in name}
        table = {name: into for name, into in super()._table().items() if name not in mlps}
        for layer in range(self.config.num_layers):
            if layer in self._moe_layers:
                table |= self._expert_table(layer)
                continue
            for name, into in mlps.items():
                table[name.replace("*", str(layer))] = Into(into.module.replace("*", str(layer)), into.shard)
        return table

    def _expert_table(self, layer: int) -> WeightTable:
        names, ours = self.expert_names, f"model.layers.{layer}.mlp"
        theirs = f"model.layers.{layer}.{names.block}"
        table = {f"{theirs}.gate": Into(f"{ours}.gate")}
        for expert in range(self._num_experts):
            table |= dict(_gated_mlp(f"{theirs}.experts.{expert}", f"{ours}.experts.{expert}", names))
        return table


def _gated_mlp(theirs: str, ours: str, names: ExpertNames) -> Iterator[tuple[str, Into]]:
    yield f"{theirs}.{names.gate_proj}", Into(f"{ours}.gate_up_proj", shard="gate")
    yield f"{theirs}.{names.up_proj}", Into(f"{ours}.gate_up_proj", shard="up")
    yield f"{theirs}.{names.down_proj}", Into(f"{ours}.down_proj")


def read_routing(fields: ConfigFields, *, normalizes: bool | None = None) -> Routing:
    """Softmax routing. normalizes: None takes `norm_topk_prob`. Raises ModelError for more experts than there are."""
    # Older checkpoints of some families have the second name.
    name = next((name for name in ("num_local_experts", "num_experts") if name in fields.hf_config), "num_experts")
    num_experts, top_k = fields.integer(name), fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise ModelError(
            f"config.json of {fields.model_config.model} has num_experts_per_tok={top_k}. It must be at most "
            f"{name}={num_experts}."
        )
    if normalizes is None:
        normalizes = fields.flag("norm_topk_prob", default=False)
    return Routing(num_experts, top_k, normalizes=normalizes)


def _sparse_layers(fields: ConfigFields, num_layers: int) -> list[int]:
    """Layers with experts: every `decoder_sparse_step`th one that `mlp_only_layers` does not name."""
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.hf_config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.unsupported("mlp_only_layers", dense, "a list of layer numbers")
    return [layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0]


class MixtralForCausalLM(MixtureForCausalLM):
    """Experts in every layer, whose weights are normalised."""

    expert_names: ClassVar[ExpertNames] = ExpertNames("block_sparse_moe", "w1", "w3", "w2")

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        routing = read_routing(fields, normalizes=True)
        window = fields.optional_integer("sliding_window")
        layers = list(range(config.num_layers))
        moe = _mixtures(config, routing, config.intermediate_size, parallel, layers)
        model = plain_decoder(config, parallel, windows=[window] * config.num_layers, moe=moe)
        super().__init__(config, parallel, model, layers, routing)


class Qwen2MoeForCausalLM(MixtureForCausalLM):
    """Experts in some layers, with a gated one that all tokens share."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        routing = read_routing(fields)
        layers = _sparse_layers(fields, config.num_layers)
        moe = _mixtures(
            config,
            routing,
            fields.integer("moe_intermediate_size"),
            parallel,
            layers,
            shared_size=fields.integer("shared_expert_intermediate_size"),
        )
        bias = fields.flag("qkv_bias", default=True)
        windows = read_qwen_windows(fields, config.num_layers)
        model = plain_decoder(config, parallel, qkv_bias=bias, windows=windows, moe=moe)
        super().__init__(config, parallel, model, layers, routing)

    def _expert_table(self, layer: int) -> WeightTable:
        prefix = f"model.layers.{layer}.mlp.shared_expert"
        shared = dict(_gated_mlp(prefix, prefix, self.expert_names))
        return {**super()._expert_table(layer), **shared, f"{prefix}_gate": Into(f"{prefix}.gate")}


class Qwen3MoeForCausalLM(MixtureForCausalLM):
    """Experts in some layers; query and key norms."""

    weight_table: ClassVar[WeightTable] = {**DECODER_WEIGHTS, **QUERY_KEY_NORMS}

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        routing = read_routing(fields)
        layers = _sparse_layers(fields, config.num_layers)
        moe = _mixtures(config, routing, fields.integer("moe_intermediate_size"), parallel, layers)
        bias = fields.flag("attention_bias", default=False)
        window = None
        if fields.flag("use_sliding_window", default=False):
            window = fields.optional_integer("sliding_window", default=4096)
        model = plain_decoder(
            config,
            parallel,
            qkv_bias=bias,
            output_bias=bias,
            windows=[window] * config.num_layers,
            query_key_norm=QueryKeyNorm,
            moe=moe,
        )
        super().__init__(config, parallel, model, layers, routing)


class OlmoeForCausalLM(MixtureForCausalLM):
    """Experts in every layer; query and key norms over all heads."""

    weight_table: ClassVar[WeightTable] = {
        **DECODER_WEIGHTS,
        "model.layers.*.self_attn.q_norm": Into("model.layers.*.self_attn.query_key_norm.q_norm"),
        "model.layers.*.self_attn.k_norm": Into("model.layers.*.self_attn.query_key_norm.k_norm"),
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        if fields.hf_config.get("clip_qkv") is not None:
            raise fields.unsupported("clip_qkv", fields.hf_config["clip_qkv"], "null")
        routing = read_routing(fields)
        layers = list(range(config.num_layers))
        bias = fields.flag("attention_bias", default=False)
        model = plain_decoder(
            config,
            parallel,
            qkv_bias=bias,
            output_bias=bias,
            query_key_norm=whole_query_key_norm(config, parallel),
            moe=_mixtures(config, routing, config.intermediate_size, parallel, layers),
        )
        super().__init__(config, parallel, model, layers, routing)


def _mixtures(
    config: DecoderConfig,
    routing: Routing,
    intermediate_size: int,
    parallel: ParallelState,
    layers: list[int],
    *,
    shared_size: int = 0,
) -> Callable[[int], MoE | None]:
    """Function that makes the experts of a layer; None for a layer with an MLP."""
    make = partial(
        MoE,
        config.hidden_size,
        intermediate_size,
        routing,
        activation=config.activation,
        parallel=parallel,
        shared_size=shared_size,
        gates_shared=shared_size > 0,
    )
    return lambda layer: make() if layer in layers else None
