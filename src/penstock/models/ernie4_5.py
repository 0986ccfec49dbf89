"""Ernie 4.5, dense and with experts (Baidu 2025, https://github.com/PaddlePaddle/ERNIE)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from penstock.config import ModelConfig
from penstock.layers.experts import Routing
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, plain_decoder
from penstock.models.mixtures import MixtureForCausalLM, mixtures, read_routing
from penstock.parallel import ParallelState

_CORRECTION = "e_score_correction_bias"
# Fields of published configurations with experts, with the value implemented here.
_FIXED = {"use_bias": False, "moe_gate": "topk", "moe_gate_act": "softmax", "moe_use_aux_free": True}
# Defaults of absent fields.
_DEFAULT_HEAD_SIZE = 128
_DEFAULT_THETA = 500000.0
_DEFAULT_LEAST_SUM = 1e-12


class Ernie4_5ForCausalLM(DecoderForCausalLM):  # noqa: N801
    """The plain decoder; pairs that rotate are adjacent in checkpoints. `use_bias` adds biases to all projections."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        # Unlike an absent field, null takes hidden_size / num_attention_heads.
        config = _read_config(fields, None if "head_dim" in fields.hf_config else _DEFAULT_HEAD_SIZE)
        bias = fields.flag("use_bias", default=False)
        model = plain_decoder(config, parallel, qkv_bias=bias, output_bias=bias, mlp_bias=bias)
        super().__init__(config, parallel, model)


class Ernie4_5_MoeForCausalLM(MixtureForCausalLM):  # noqa: N801
    """Experts in some layers, chosen by a softmax with a correction, and shared ones.

    The layers for drafting more tokens are not loaded.
    """

    ignorable: ClassVar[tuple[str, ...]] = (*MixtureForCausalLM.ignorable, r"model\.mtp_.*")

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        fields.refuse_others(_FIXED)
        config = _read_config(fields, None)
        routing = _read_routing(fields)
        layers = _read_moe_layers(fields, config.num_layers)
        size, num_shared = fields.integer("moe_intermediate_size"), fields.count("moe_num_shared_experts", default=2)
        moe = mixtures(config, routing, size, parallel, layers, shared_size=size * num_shared, has_correction=True)
        super().__init__(config, parallel, plain_decoder(config, parallel, moe=moe), layers, routing)
        self.has_shared = num_shared > 0

    def checkpoint_name(self, name: str) -> str:
        """See `CausalLM`. Checkpoints have the correction beside the router, Transformers' modules have it within."""
        return re.sub(r"\.mlp\.(gate\.)?moe_statics\.", ".mlp.gate.", name)

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Flatten the correction, which has a dimension of 1."""
        yield self.checkpoint_name(name), tensor.flatten() if name.endswith(_CORRECTION) else tensor


def _read_config(fields: ConfigFields, default_head_size: int | None) -> DecoderConfig:
    config = DecoderConfig.read(
        fields, default_head_size=default_head_size, tied_by_default=True, rope=partial(_read_rope, fields)
    )
    return replace(config, rope_interleave=True)


def _read_rope(fields: ConfigFields, head_size: int) -> RopeParameters:
    return read_rope_parameters(
        fields.hf_config, head_size=head_size, num_positions=fields.num_positions, default_theta=_DEFAULT_THETA
    )


def _read_routing(fields: ConfigFields) -> Routing:
    routing = read_routing(fields, normalizes=True, of_token="moe_k")
    return replace(routing, least_sum=fields.number("moe_norm_min", default=_DEFAULT_LEAST_SUM))


def _read_moe_layers(fields: ConfigFields, num_layers: int) -> list[int]:
    """Layers with experts: every `moe_layer_interval`th one between the first and the last, where -1 is the last."""
    first, step = fields.count("moe_layer_start_index", default=1), fields.integer("moe_layer_interval", default=1)
    end = fields.hf_config.get("moe_layer_end_index")
    last = num_layers - 1 if end in (None, -1) else fields.count("moe_layer_end_index", default=0)
    return [layer for layer in range(first, num_layers) if layer <= last and (layer + 1) % step == 0]
