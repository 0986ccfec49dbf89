"""RecurrentGemma (Gemma team 2024, https://arxiv.org/abs/2404.07839): Griffin's recurrent blocks, and windows.

Suffixes: T tokens of the step, L logits rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.errors import ModelError
from penstock.layers.embedding import ScaledVocabEmbedding
from penstock.layers.norm import ZeroCentredRMSNorm
from penstock.layers.recurrence.gated_lru import GatedLRU
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.models.config_fields import LINEAR, SLIDING, ConfigFields
from penstock.models.decoder import (
    ATTENTION_WEIGHTS,
    COMMON_WEIGHTS,
    DecoderConfig,
    DecoderForCausalLM,
    DecoderLayer,
    DecoderModel,
    SelfAttention,
)
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

_KINDS = {"recurrent": LINEAR, "attention": SLIDING}
_DEFAULT_BLOCKS = ["recurrent", "recurrent", "attention"]
# Part of a head that rotates, where the configuration does not say.
_ROTARY_PART = 0.5
_NAMES = {
    ".temporal_pre_norm": ".input_layernorm",
    ".channel_pre_norm": ".post_attention_layernorm",
    ".temporal_block.": ".self_attn.",
    ".mlp_block.": ".mlp.",
    "model.final_norm": "model.norm",
}
_THEIRS, _OURS = "model.layers.*.temporal_block", "model.layers.*.self_attn"


def _renamed(table: WeightTable) -> WeightTable:
    """The weights under the names of this family's checkpoints."""
    for theirs, ours in _NAMES.items():
        table = {name.replace(ours, theirs): into for name, into in table.items()}
    return table


class RecurrentGemmaForCausalLM(DecoderForCausalLM):
    """Recurrent blocks, and attention with a window in every third layer, each before an MLP."""

    weight_table: ClassVar[WeightTable] = _renamed(COMMON_WEIGHTS)
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = {
        SLIDING: _renamed(ATTENTION_WEIGHTS),
        LINEAR: {
            f"{_THEIRS}.linear_x": Into(f"{_OURS}.in_proj", shard="x"),
            f"{_THEIRS}.linear_y": Into(f"{_OURS}.in_proj", shard="y"),
            f"{_THEIRS}.conv_1d": Into(f"{_OURS}.conv1d"),
            f"{_THEIRS}.rg_lru": Into(_OURS),
            f"{_THEIRS}.linear_out": Into(f"{_OURS}.out_proj"),
        },
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        middle = fields.integer("intermediate_size", default=3 * 2560) // 2
        config = DecoderConfig.read(
            fields,
            tied_by_default=True,
            activation_field="hidden_activation",
            default_activation="gelu_pytorch_tanh",
            intermediate_size=middle,
            rope=partial(_read_rope, fields),
        )
        config = replace(config, norm=ZeroCentredRMSNorm)
        kinds, width = _read_kinds(fields, config.num_layers), fields.integer("lru_width", config.hidden_size)
        if width % config.num_heads:
            raise ModelError(
                f"{fields.source} has lru_width={width}. It must be a multiple of "
                f"num_attention_heads={config.num_heads}, the blocks of its gates."
            )
        window, taps = fields.integer("attention_window_size", default=2048), fields.integer("conv1d_width", default=4)
        bias = fields.flag("attention_bias", default=False)

        def layer(index: int) -> DecoderLayer:
            if kinds[index] == SLIDING:
                mixer: SelfAttention | GatedLRU = SelfAttention(
                    config, index, parallel, qkv_bias=bias, output_bias=True, sliding_window=window
                )
            else:
                mixer = GatedLRU(
                    config.hidden_size,
                    width,
                    config.num_heads,
                    taps,
                    activation=config.activation,
                    name=f"model.layers.{index}.temporal_block",
                    parallel=parallel,
                )
            return DecoderLayer(config, mixer, parallel, mlp_bias=True)

        # The factor is rounded, whatever the dtype of the embeddings.
        scale = float(torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16, device="cpu"))
        embed_tokens = ScaledVocabEmbedding(config.vocab_size, config.hidden_size, scale=scale, parallel=parallel)
        embed_tokens.scales_given = True
        super().__init__(config, parallel, DecoderModel(config, parallel, layer, embed_tokens=embed_tokens))
        self.layer_kinds = kinds
        self._soft_cap = fields.number("logits_soft_cap", default=30.0)

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        logits_LV = super().compute_logits(hidden_LD, context)
        return logits_LV.div_(self._soft_cap).tanh_().mul_(self._soft_cap)


def _read_kinds(fields: ConfigFields, num_layers: int) -> Sequence[str]:
    """Kind of each layer, of `block_types`, which are repeated."""
    types = fields.hf_config.get("block_types") or _DEFAULT_BLOCKS
    if not isinstance(types, list) or not set(types) <= set(_KINDS):
        raise fields.unsupported("block_types", types, f"a list of {', '.join(_KINDS)}")
    return [_KINDS[types[layer % len(types)]] for layer in range(num_layers)]


def _read_rope(fields: ConfigFields, head_size: int) -> RopeParameters:
    hf_config = {"partial_rotary_factor": _ROTARY_PART, "max_position_embeddings": 8192, **fields.hf_config}
    return read_rope_parameters(hf_config, head_size=head_size, num_positions=fields.num_positions, may_be_partial=True)
