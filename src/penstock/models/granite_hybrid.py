"""Granite 4, with state-space layers or without, dense or with experts (IBM 2025, https://github.com/ibm-granite).

Granite's factors, Mamba 2 in most layers, and attention without positions in the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from penstock.config import ModelConfig
from penstock.layers.recurrence.state_space import StateSpaceMixer
from penstock.models.config_fields import FULL, ConfigFields
from penstock.models.decoder import ATTENTION_WEIGHTS, COMMON_WEIGHTS, DecoderConfig
from penstock.models.granite import GraniteMixture, granite_decoder
from penstock.models.mamba_fields import STATE_SPACE, read_hybrid_kinds, read_state_space, state_space_weights
from penstock.models.mixtures import mixtures, read_routing
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState


class GraniteMoeHybridForCausalLM(GraniteMixture):
    """State-space layers and attention, each before an MLP and, in some models, experts that are added to it."""

    weight_table: ClassVar[WeightTable] = {
        **{name: into for name, into in COMMON_WEIGHTS.items() if ".mlp." not in name},
        "model.layers.*.shared_mlp.input_linear": Into("model.layers.*.mlp.gate_up_proj"),
        "model.layers.*.shared_mlp.output_linear": Into("model.layers.*.mlp.down_proj"),
    }
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = {
        FULL: ATTENTION_WEIGHTS,
        STATE_SPACE: state_space_weights("model.layers.*.mamba", "model.layers.*.self_attn"),
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        shared_size = fields.integer("shared_intermediate_size", default=1024)
        config = DecoderConfig.read(fields, intermediate_size=shared_size)
        num_layers = config.num_layers
        kinds = read_hybrid_kinds(fields, num_layers) or [STATE_SPACE] * num_layers
        sizes = read_state_space(fields, config.hidden_size, config.norm_eps)

        def mixer(index: int) -> StateSpaceMixer | None:
            if kinds[index] == FULL:
                return None
            return StateSpaceMixer(config.hidden_size, sizes, name=f"model.layers.{index}.mamba", parallel=parallel)

        layers, routing, moe = [], None, None
        if fields.count("num_local_experts", default=8):
            layers, routing = list(range(num_layers)), read_routing(fields, normalizes=True)
            size = fields.integer("intermediate_size")
            moe = mixtures(config, routing, size, parallel, layers, shared_size=shared_size)
        has_positions = fields.hf_config.get("position_embedding_type") == "rope"
        ropes = [config.rope if has_positions else None] * num_layers
        model = granite_decoder(fields, config, parallel, moe=moe, mixer=mixer, ropes=ropes)
        super().__init__(fields, config, parallel, model, layers, routing)
        self.layer_kinds = kinds

    def _expert_table(self, layer: int) -> WeightTable:
        theirs, ours = f"model.layers.{layer}", f"model.layers.{layer}.mlp.shared_expert"
        return {
            **super()._expert_table(layer),
            f"{theirs}.shared_mlp.input_linear": Into(f"{ours}.gate_up_proj"),
            f"{theirs}.shared_mlp.output_linear": Into(f"{ours}.down_proj"),
        }
