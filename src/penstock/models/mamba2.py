"""Mamba 2, without attention (Dao and Gu 2024, https://arxiv.org/abs/2405.21060).

Suffixes: T tokens of the step, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.kernels.rotary import Rotation
from penstock.layers.norm import RMSNorm, norm_of_stream
from penstock.layers.recurrence.state_space import StateSpace, StateSpaceMixer
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderModel
from penstock.models.mamba_fields import checked, read_step_limits, state_space_weights
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

_EMBEDDING = "backbone.embeddings"
# Weights besides those of the mixers.
BACKBONE_WEIGHTS: WeightTable = {
    _EMBEDDING: Into("model.embed_tokens"),
    "backbone.layers.*.norm": Into("model.layers.*.norm"),
    "backbone.norm_f": Into("model.norm"),
    "lm_head": Into("lm_head"),
}


class MixerLayer(nn.Module):
    """x + mixer(norm(x)): a layer of one part, which is called as attention is."""

    def __init__(self, norm: RMSNorm, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = norm, mixer

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Output and residual, whose sum is the residual stream."""
        hidden_TD, residual_TD = norm_of_stream(self.norm, hidden_TD, residual_TD)
        hidden_TD = self.mixer(hidden_TD, rotation, context)
        return hidden_TD, context.narrowed(residual_TD)


class BackboneForCausalLM(DecoderForCausalLM):
    """Mamba layers alone. The residual stream has the dtype of the model, whatever `residual_in_fp32` says."""

    def checkpoint_name(self, name: str) -> str:
        """The first checkpoints have another name of the embedding."""
        return name.replace("backbone.embedding.", "backbone.embeddings.")

    def tied_weights(self) -> Mapping[str, str]:
        return {"lm_head.weight": f"{_EMBEDDING}.weight"} if self.config.tie_word_embeddings else {}


class Mamba2ForCausalLM(BackboneForCausalLM):
    """State-space layers of Mamba 2."""

    weight_table: ClassVar[WeightTable] = {
        **BACKBONE_WEIGHTS,
        **state_space_weights("backbone.layers.*.mixer", "model.layers.*.mixer"),
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = read_backbone_config(fields, tied_by_default=False)
        sizes = _read_sizes(fields, config)

        def layer(index: int) -> MixerLayer:
            name = f"model.layers.{index}.mixer"
            mixer = StateSpaceMixer(config.hidden_size, sizes, name=name, parallel=parallel)
            return MixerLayer(RMSNorm(config.hidden_size, config.norm_eps), mixer)

        super().__init__(config, parallel, DecoderModel(config, parallel, layer))


def read_backbone_config(fields: ConfigFields, *, tied_by_default: bool) -> DecoderConfig:
    """Configuration of a model without attention and MLPs. tied_by_default: for an absent `tie_word_embeddings`."""
    fields.refuse_unsupported()
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=tied_by_default),
        activation=fields.choice("hidden_act", ("silu", "swish"), "silu"),
        rope=None,
        intermediate_size=0,
        num_heads=0,
        num_kv_heads=0,
        head_size=0,
    )


def _read_sizes(fields: ConfigFields, config: DecoderConfig) -> StateSpace:
    bias = fields.flag("use_bias", default=False)
    min_step, max_step = read_step_limits(fields)
    sizes = StateSpace(
        num_heads=fields.integer("num_heads", default=128),
        head_size=fields.integer("head_dim", default=64),
        num_groups=fields.integer("n_groups", default=8),
        state_size=fields.integer("state_size", default=128),
        kernel_size=fields.integer("conv_kernel", default=4),
        min_step=min_step,
        max_step=max_step,
        bias=bias,
        output_bias=bias,
        convolution_bias=fields.flag("use_conv_bias", default=True),
        norm_eps=config.norm_eps,
    )
    return checked(fields, fields.integer("expand", default=2) * config.hidden_size, sizes)
