"""MiniMax-M2 (MiniMax 2025, https://huggingface.co/MiniMaxAI/MiniMax-M2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from penstock.config import ModelConfig
from penstock.layers.experts import SIGMOID
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.layers.weights import WeightSlot
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, plain_decoder
from penstock.models.mixtures import ExpertNames, MixtureForCausalLM, mixtures, read_routing
from penstock.models.olmo2 import whole_query_key_norm
from penstock.models.olmoe import OlmoeForCausalLM
from penstock.models.weights import WeightTable
from penstock.parallel import ParallelState

_BLOCK = "block_sparse_moe"
# Fields of published configurations that say how other models of this maker differ, with the value implemented here.
_FIXED = {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True, "shared_intermediate_size": 0}


class MiniMaxM2ForCausalLM(MixtureForCausalLM):
    """Experts in every layer, chosen by sigmoids with a correction; query and key norms over all heads.

    A part of each head rotates.
    """

    expert_names: ClassVar[ExpertNames] = ExpertNames(_BLOCK, "w1", "w3", "w2")
    weight_table: ClassVar[WeightTable] = OlmoeForCausalLM.weight_table

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        fields.refuse_others(_FIXED)
        if 0 in fields.hf_config.get("attn_type_list", ()):
            raise fields.unsupported("attn_type_list", fields.hf_config["attn_type_list"], "1 for each layer")
        config = DecoderConfig.read(fields, rope=partial(read_rope_of_dimensions, fields))
        routing = replace(read_routing(fields, normalizes=True), scoring=SIGMOID)
        layers = list(range(config.num_layers))
        moe = mixtures(config, routing, config.intermediate_size, parallel, layers, has_correction=True)
        norm = whole_query_key_norm(config, parallel)
        super().__init__(
            config, parallel, plain_decoder(config, parallel, query_key_norm=norm, moe=moe), layers, routing
        )

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        # Checkpoints have the correction beside the router.
        of_router, of_block = (f"{_BLOCK}{part}.e_score_correction_bias" for part in (".gate", ""))
        return {name.replace(of_router, of_block): slot for name, slot in super().checkpoint_slots().items()}

    def names_elsewhere(self) -> Sequence[str]:
        names = super().names_elsewhere()
        return [*names, *(name.replace(rf"{_BLOCK}\.gate", _BLOCK) for name in names if rf"{_BLOCK}\.gate" in name)]


def read_rope_of_dimensions(fields: ConfigFields, head_size: int) -> RopeParameters:
    """Rotary embedding of so many dimensions of a head as the configuration says (`rotary_dim`)."""
    hf_config = dict(fields.hf_config)
    if "rotary_dim" in hf_config:
        hf_config.setdefault("partial_rotary_factor", fields.integer("rotary_dim") / head_size)
    return read_rope_parameters(hf_config, head_size=head_size, num_positions=fields.num_positions, may_be_partial=True)
