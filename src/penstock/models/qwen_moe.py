"""Qwen2-MoE and Qwen3-MoE (Qwen team: 2024, https://arxiv.org/abs/2407.10671; 2025, arXiv:2505.09388)."""

from __future__ import annotations

from typing import ClassVar

from penstock.config import ModelConfig
from penstock.layers.norm import QueryKeyNorm
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DECODER_WEIGHTS, DecoderConfig, plain_decoder
from penstock.models.mixtures import ExpertNames, MixtureForCausalLM, gated_mlp, mixtures, read_routing
from penstock.models.qwen import QUERY_KEY_NORMS, read_qwen_windows
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState


def read_sparse_layers(fields: ConfigFields, num_layers: int) -> list[int]:
    """Layers with experts: every `decoder_sparse_step`th one that `mlp_only_layers` does not name."""
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.hf_config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.unsupported("mlp_only_layers", dense, "a list of layer numbers")
    return [layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0]


class GatedSharedExpertForCausalLM(MixtureForCausalLM):
    """A mixture with an expert that all tokens share, and a gate on its output."""

    def _expert_table(self, layer: int) -> WeightTable:
        prefix = f"model.layers.{layer}.mlp"
        return {**super()._expert_table(layer), **gated_shared_expert(prefix, prefix)}


def gated_shared_expert(theirs: str, ours: str) -> WeightTable:
    """Weights of a mixture's shared expert and its gate."""
    table = dict(gated_mlp(f"{theirs}.shared_expert", f"{ours}.shared_expert", ExpertNames()))
    return {**table, f"{theirs}.shared_expert_gate": Into(f"{ours}.shared_expert.gate")}


class Qwen2MoeForCausalLM(GatedSharedExpertForCausalLM):
    """Experts in some layers, with a gated one that all tokens share."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        routing = read_routing(fields)
        layers = read_sparse_layers(fields, config.num_layers)
        moe = mixtures(
            config,
            routing,
            fields.integer("moe_intermediate_size"),
            parallel,
            layers,
            shared_size=fields.integer("shared_expert_intermediate_size"),
            gates_shared=True,
        )
        bias = fields.flag("qkv_bias", default=True)
        windows = read_qwen_windows(fields, config.num_layers)
        model = plain_decoder(config, parallel, qkv_bias=bias, windows=windows, moe=moe)
        super().__init__(config, parallel, model, layers, routing)


class Qwen3MoeForCausalLM(MixtureForCausalLM):
    """Experts in some layers; query and key norms."""

    weight_table: ClassVar[WeightTable] = {**DECODER_WEIGHTS, **QUERY_KEY_NORMS}

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        routing = read_routing(fields)
        layers = read_sparse_layers(fields, config.num_layers)
        moe = mixtures(config, routing, fields.integer("moe_intermediate_size"), parallel, layers)
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
