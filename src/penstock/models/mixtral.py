"""Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088)."""

from __future__ import annotations

from typing import ClassVar

from penstock.config import ModelConfig
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, plain_decoder
from penstock.models.mixtures import ExpertNames, MixtureForCausalLM, mixtures, read_routing
from penstock.parallel import ParallelState


class MixtralForCausalLM(MixtureForCausalLM):
    """Experts in every layer, whose weights are normalised."""

    expert_names: ClassVar[ExpertNames] = ExpertNames("block_sparse_moe", "w1", "w3", "w2")

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        routing = read_routing(fields, normalizes=True)
        window = fields.optional_integer("sliding_window")
        layers = list(range(config.num_layers))
        moe = mixtures(config, routing, config.intermediate_size, parallel, layers)
        model = plain_decoder(config, parallel, windows=[window] * config.num_layers, moe=moe)
        super().__init__(config, parallel, model, layers, routing)
