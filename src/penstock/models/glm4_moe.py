"""GLM-4.5 and its kin, GLM-4 MoE (GLM-4.5 team 2025, https://arxiv.org/abs/2508.06471)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from penstock.config import ModelConfig
from penstock.layers.experts import SIGMOID, Routing
from penstock.layers.norm import QueryKeyNorm
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, plain_decoder
from penstock.models.mixtures import SharedExpertsForCausalLM, mixtures, read_groups, read_routing
from penstock.models.qwen import QUERY_KEY_NORMS
from penstock.models.weights import WeightTable
from penstock.parallel import ParallelState

# Sarvam MoE is this decoder under other names, which Transformers writes again when it saves one.
_SARVAM_NAMES = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.query_layernorm.": ".self_attn.q_norm.",
    ".attention.key_layernorm.": ".self_attn.k_norm.",
    ".attention.": ".self_attn.",
    ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
}
_SARVAM_QKV = ".self_attn.query_key_value."
# Part of a head that rotates, where the configuration does not say.
_DEFAULT_ROTARY_PART = 0.5


def read_grouped_routing(fields: ConfigFields) -> Routing:
    """Sigmoid routing with a correction for the choice, of the best groups of experts (DeepSeek-V3)."""
    routing = read_routing(fields, normalizes=fields.flag("norm_topk_prob", default=True))
    routing = replace(routing, scoring=SIGMOID, scale=fields.number("routed_scaling_factor", default=1.0))
    return read_groups(fields, routing, best_of_group=2)


class Glm4MoeForCausalLM(SharedExpertsForCausalLM):
    """Experts after the first layers, chosen by sigmoids with a correction, and shared ones; a part of a head rotates.

    The layers for drafting more tokens are not loaded.
    """

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields, rope=partial(_read_rope, fields))
        routing = read_grouped_routing(fields)
        layers = list(range(fields.count("first_k_dense_replace", default=1), config.num_layers))
        size = fields.integer("moe_intermediate_size")
        has_norms = fields.flag("use_qk_norm", default=False)
        model = plain_decoder(
            config,
            parallel,
            qkv_bias=fields.flag("attention_bias", default=False),
            query_key_norm=QueryKeyNorm if has_norms else None,
            moe=mixtures(
                config,
                routing,
                size,
                parallel,
                layers,
                shared_size=size * fields.integer("n_shared_experts", default=1),
                has_correction=True,
            ),
        )
        super().__init__(config, parallel, model, layers, routing)
        self._has_norms = has_norms
        self._qkv_sizes = [config.head_size * heads for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
        self.num_drafting = fields.count("num_nextn_predict_layers", default=0)

    def checkpoint_name(self, name: str) -> str:
        """See `CausalLM`. Checkpoints of Sarvam MoE have names of their own."""
        for old, new in _SARVAM_NAMES.items():
            name = name.replace(old, new)
        return name

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Cut the fused projection of Sarvam MoE."""
        name = self.checkpoint_name(name)
        if _SARVAM_QKV not in name or tensor.shape[0] != sum(self._qkv_sizes):
            yield from super().pieces(name, tensor)
            return
        for projection, part in zip("qkv", tensor.split(self._qkv_sizes), strict=True):
            yield name.replace(_SARVAM_QKV, f".self_attn.{projection}_proj."), part

    def _table(self) -> WeightTable:
        return {**super()._table(), **(QUERY_KEY_NORMS if self._has_norms else {})}


def _read_rope(fields: ConfigFields, head_size: int) -> RopeParameters:
    hf_config = {"partial_rotary_factor": _DEFAULT_ROTARY_PART, **fields.hf_config}
    return read_rope_parameters(hf_config, head_size=head_size, num_positions=fields.num_positions, may_be_partial=True)
