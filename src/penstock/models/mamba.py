"""Mamba (Gu and Dao 2023, https://arxiv.org/abs/2312.00752) and Falcon-Mamba (TII 2024, arXiv:2410.05355)."""

from __future__ import annotations

from typing import ClassVar

from penstock.config import ModelConfig
from penstock.layers.norm import RMSNorm
from penstock.layers.recurrence.selective_scan import SelectiveScan, SelectiveSizes
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderModel
from penstock.models.mamba2 import BACKBONE_WEIGHTS, BackboneForCausalLM, MixerLayer, read_backbone_config
from penstock.models.mamba_fields import read_step_rank, selective_weights
from penstock.models.weights import WeightTable
from penstock.parallel import ParallelState


class MambaForCausalLM(BackboneForCausalLM):
    """State-space layers of Mamba. norms_inputs: whether steps, keys and queries are normalised."""

    norms_inputs: ClassVar[bool] = False
    weight_table: ClassVar[WeightTable] = {
        **BACKBONE_WEIGHTS,
        **selective_weights("backbone.layers.*.mixer", "model.layers.*.mixer"),
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = read_backbone_config(fields, tied_by_default=True)
        inner_size = int(fields.number("expand", default=2) * config.hidden_size)
        sizes = SelectiveSizes(
            inner_size=fields.integer("intermediate_size", default=inner_size),
            state_size=fields.integer("state_size", default=16),
            step_rank=read_step_rank(fields, "time_step_rank", config.hidden_size),
            kernel_size=fields.integer("conv_kernel", default=4),
            bias=fields.flag("use_bias", default=False),
            convolution_bias=fields.flag("use_conv_bias", default=True),
            norm_eps=fields.number("mixer_rms_eps", default=1e-6) if self.norms_inputs else None,
            has_norm_weights=False,
        )

        def layer(index: int) -> MixerLayer:
            mixer = SelectiveScan(config.hidden_size, sizes, name=f"model.layers.{index}.mixer", parallel=parallel)
            return MixerLayer(RMSNorm(config.hidden_size, config.norm_eps), mixer)

        super().__init__(config, parallel, DecoderModel(config, parallel, layer))


class FalconMambaForCausalLM(MambaForCausalLM):
    """Mamba with norms without weights on steps, keys and queries."""

    norms_inputs: ClassVar[bool] = True
