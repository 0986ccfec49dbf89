"""Llama 4, its language model (Meta 2025, https://ai.meta.com/blog/llama-4-multimodal-intelligence).

Suffixes: T tokens of the step, D hidden size, H query heads, X features of several heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.layers.experts import SIGMOID
from penstock.layers.norm import UnweightedQueryKeyNorm
from penstock.layers.rotary import LayerRotations
from penstock.models.causal_lm import StackedParameter
from penstock.models.config_fields import FULL, ConfigFields
from penstock.models.decoder import DECODER_WEIGHTS, DecoderConfig, DecoderLayer, DecoderModel, SelfAttention
from penstock.models.mixtures import ExpertNames, MixtureForCausalLM, gated_mlp, mixtures, read_routing
from penstock.models.weights import WeightTable
from penstock.parallel import ParallelState, layers_of_stage

CHUNKED = "chunked_attention"
_STACKED_EXPERTS = re.compile(r"(.*\.feed_forward\.experts)\.(gate_up_proj|down_proj)")
# Defaults of absent fields.
_DEFAULT_HEAD_SIZE = 128
_DEFAULT_CHUNK_SIZE = 8192
_DEFAULT_DENSE_SIZE = 16384
_DEFAULT_NO_ROPE_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class Temperature:
    """Factors on queries of layers without positions: 1 + scale * log(1 + floor((position + 1) / floor_scale)).

    Nakanishi 2025, https://arxiv.org/abs/2501.19399.
    """

    scale: float
    floor_scale: float

    def factors(self, positions_T: Tensor) -> Tensor:
        """float32 [T, 1, 1]."""
        steps_T = torch.floor((positions_T.float() + 1.0) / self.floor_scale)
        return (torch.log1p(steps_T) * self.scale + 1.0).view(-1, 1, 1)


class Llama4Rotations(LayerRotations):
    """Rotary embedding of layers with it; the factors on queries, or None, of the others."""

    def __init__(self, plain: LayerRotations, has_rope: Sequence[bool], temperature: Temperature | None) -> None:
        nn.Module.__init__(self)
        self.embeddings, self._embedding_of_layer = plain.embeddings, plain._embedding_of_layer
        self._has_rope, self._temperature = list(has_rope), temperature

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> list[Any]:
        rotations = super().forward(positions_T, dtype)
        factors_T11 = None if self._temperature is None else self._temperature.factors(positions_T)
        return [
            rotation if has_rope else factors_T11 for rotation, has_rope in zip(rotations, self._has_rope, strict=True)
        ]


class NoRopeAttention(SelfAttention):
    """Attention without rotary embedding. rotation: factors on queries, or None."""

    def forward(self, hidden_TD: Tensor, rotation: Any, context: ForwardContext) -> Tensor:
        layer = self.attn.layer
        qkv_TX = self.qkv_proj(context.whole(hidden_TD), context.of_all_tokens())
        heads_THD = qkv_TX.unflatten(-1, (-1, layer.head_size))
        query_THD, key, value = heads_THD.split_with_sizes([layer.num_heads, *[layer.num_kv_heads] * 2], 1)
        if rotation is not None:
            query_THD = (query_THD * rotation).to(query_THD.dtype)
        mixed_TX = self.attn(query_THD, key, value, context).flatten(1)
        return self.o_proj(mixed_TX, context)  # type: ignore[no-any-return]


class Llama4ForCausalLM(MixtureForCausalLM):
    """Experts, chosen by sigmoids that multiply their inputs, and a shared one, in all or every n-th layer.

    Layers with rotary embedding attend to chunks and may normalise query and key heads; the others attend to all
    positions, with queries that grow with theirs.
    """

    weight_table: ClassVar[WeightTable] = {
        name.replace(".mlp.", ".feed_forward."): into for name, into in DECODER_WEIGHTS.items()
    }
    expert_names: ClassVar[ExpertNames] = ExpertNames("feed_forward", router="router")

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = replace(DecoderConfig.read(fields, default_head_size=_DEFAULT_HEAD_SIZE), rope_interleave=True)
        has_rope = _read_rope_layers(fields, config.num_layers)
        chunk_sizes = _read_chunk_sizes(fields, has_rope)
        layers = _read_moe_layers(fields, config.num_layers)
        routing = replace(read_routing(fields, normalizes=False), scoring=SIGMOID, weighs_inputs=True)
        size = config.intermediate_size
        moe = mixtures(config, routing, size, parallel, layers, shared_size=size)
        dense = replace(config, intermediate_size=fields.integer("intermediate_size_mlp", default=_DEFAULT_DENSE_SIZE))
        has_bias, has_norms = fields.flag("attention_bias", default=False), fields.flag("use_qk_norm", default=True)

        def layer(index: int) -> DecoderLayer:
            attention = (SelfAttention if has_rope[index] else NoRopeAttention)(
                config,
                index,
                parallel,
                qkv_bias=has_bias,
                output_bias=has_bias,
                chunk_size=chunk_sizes[index],
                query_key_norm=UnweightedQueryKeyNorm if has_norms and has_rope[index] else None,
            )
            return DecoderLayer(dense, attention, parallel, moe=moe(index))

        model = DecoderModel(config, parallel, layer)
        stage = layers_of_stage(config.num_layers, parallel)
        of_stage = has_rope[stage.start : stage.stop]
        model.rotations = Llama4Rotations(model.rotations, of_stage, _read_temperature(fields))
        super().__init__(config, parallel, model, layers, routing)

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Cut the tensors of all experts, [inputs, outputs]."""
        stacked = _STACKED_EXPERTS.fullmatch(name)
        if stacked is None:
            yield from super().pieces(name, tensor)
            return
        prefix, projection = stacked.groups()
        for expert, of_expert in enumerate(tensor):
            if projection == "down_proj":
                yield f"{prefix}.{expert}.down_proj.weight", of_expert.t()
                continue
            for half, rows in zip(("gate_proj", "up_proj"), of_expert.t().chunk(2), strict=True):
                yield f"{prefix}.{expert}.{half}.weight", rows

    def stacked_parameters(self) -> Mapping[str, Sequence[StackedParameter]]:
        """None, so that adapters of the stacked experts are refused."""
        return {}

    def _expert_table(self, layer: int) -> WeightTable:
        shared = f"model.layers.{layer}.feed_forward.shared_expert", f"model.layers.{layer}.mlp.shared_expert"
        return {**super()._expert_table(layer), **dict(gated_mlp(*shared, ExpertNames()))}


def _read_rope_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Whether each layer has rotary embedding: 1 in `no_rope_layers`, or else all but every n-th."""
    flags = fields.hf_config.get("no_rope_layers")
    if not flags:
        interval = fields.integer("no_rope_layer_interval", default=_DEFAULT_NO_ROPE_INTERVAL)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers or not set(flags) <= {0, 1}:
        raise fields.unsupported("no_rope_layers", flags, f"a list of num_hidden_layers={num_layers} zeros and ones")
    return [bool(flag) for flag in flags]


def _read_chunk_sizes(fields: ConfigFields, has_rope: Sequence[bool]) -> list[int | None]:
    """Chunk size of each layer, None for full attention."""
    chunk_size = fields.optional_integer("attention_chunk_size", default=_DEFAULT_CHUNK_SIZE)
    by_rope = [CHUNKED if rope and chunk_size is not None else FULL for rope in has_rope]
    kinds = fields.layer_types(len(by_rope)) or by_rope
    if not set(kinds) <= {FULL, CHUNKED}:
        raise fields.unsupported("layer_types", kinds, f"{FULL}, {CHUNKED}")
    if CHUNKED in kinds and chunk_size is None:
        raise fields.unsupported("attention_chunk_size", None, f"a positive integer, since some layers are {CHUNKED}")
    return [chunk_size if kind == CHUNKED else None for kind in kinds]


def _read_moe_layers(fields: ConfigFields, num_layers: int) -> list[int]:
    layers, step = fields.hf_config.get("moe_layers"), fields.integer("interleave_moe_layer_step", default=1)
    if layers is None:
        return list(range(step - 1, num_layers, step))
    if not isinstance(layers, list) or not set(layers) <= set(range(num_layers)):
        raise fields.unsupported("moe_layers", layers, f"a list of numbers below num_hidden_layers={num_layers}")
    return layers


def _read_temperature(fields: ConfigFields) -> Temperature | None:
    # Published configurations have 4 for true.
    if not fields.hf_config.get("attn_temperature_tuning", True):
        return None
    return Temperature(fields.number("attn_scale", default=0.1), fields.number("floor_scale", default=8192))
