"""Granite 3, dense and with experts (IBM 2024, https://github.com/ibm-granite/granite-3.0-language-models).

The plain decoder with factors on the embedding, on the output of each part of a layer, on the scores and on the logits.
Suffixes: T tokens of the step, L logits rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.kernels.rotary import Rotation
from penstock.layers.embedding import ScaledVocabEmbedding
from penstock.layers.experts import MoE, Routing
from penstock.layers.norm import norm_of_stream
from penstock.layers.rope_scaling import RopeParameters
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderLayer, DecoderModel, SelfAttention
from penstock.models.mixtures import ExpertNames, MixtureForCausalLM, mixtures, read_routing
from penstock.parallel import ParallelState

_STACKED_EXPERTS = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
}


class GraniteLayer(DecoderLayer):
    """x + factor * attention(norm(x)), then x + factor * mlp(norm(x))."""

    residual_multiplier: float = 1.0

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        hidden_TD, residual_TD = norm_of_stream(self.input_layernorm, hidden_TD, residual_TD)
        hidden_TD = self.self_attn(hidden_TD, rotation, context).mul_(self.residual_multiplier)
        residual_TD = context.narrowed(residual_TD)
        hidden_TD, residual_TD = self.post_attention_layernorm.add_and_norm(hidden_TD, residual_TD)
        return self.feed_forward(hidden_TD, context).mul_(self.residual_multiplier), residual_TD


def granite_decoder(
    fields: ConfigFields,
    config: DecoderConfig,
    parallel: ParallelState,
    *,
    mlp_bias: bool = False,
    moe: Callable[[int], MoE | None] | None = None,
    mixer: Callable[[int], nn.Module | None] = lambda _: None,
    ropes: Sequence[RopeParameters | None] | None = None,
) -> DecoderModel:
    """Build the model. moe: as in `plain_decoder`. mixer: makes what a layer has in place of attention, or None.

    ropes: as of `DecoderModel`.
    """
    bias = fields.flag("attention_bias", default=False)
    scale, multiplier = fields.number("attention_multiplier", default=1.0), fields.number("residual_multiplier", 1.0)

    def layer(index: int) -> GraniteLayer:
        mixes = mixer(index) or SelfAttention(config, index, parallel, qkv_bias=bias, output_bias=bias, scale=scale)
        made = GraniteLayer(config, mixes, parallel, mlp_bias=mlp_bias, moe=None if moe is None else moe(index))
        made.residual_multiplier = float(multiplier)
        return made

    embedding_multiplier = float(fields.number("embedding_multiplier", default=1.0))
    embed_tokens = ScaledVocabEmbedding(
        config.vocab_size, config.hidden_size, scale=embedding_multiplier, parallel=parallel
    )
    embed_tokens.scales_given = True
    return DecoderModel(config, parallel, layer, embed_tokens=embed_tokens, ropes=ropes)


class GraniteForCausalLM(DecoderForCausalLM):
    """Granite with MLPs."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        model = granite_decoder(fields, config, parallel, mlp_bias=fields.flag("mlp_bias", default=False))
        super().__init__(config, parallel, model)
        self._logits_scaling = fields.number("logits_scaling", default=1.0)

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        return super().compute_logits(hidden_LD, context).div_(self._logits_scaling)


class GraniteMixture(MixtureForCausalLM):
    """Granite with experts, whose weights are a softmax over the chosen ones.

    Checkpoints hold the experts of a layer in one tensor.
    """

    expert_names: ClassVar[ExpertNames] = ExpertNames(
        "block_sparse_moe", router="router.layer", stacked_block="block_sparse_moe", stacked_router="router"
    )

    def __init__(
        self,
        fields: ConfigFields,
        config: DecoderConfig,
        parallel: ParallelState,
        model: DecoderModel,
        moe_layers: list[int],
        routing: Routing | None,
    ) -> None:
        super().__init__(config, parallel, model, moe_layers, routing)
        self._logits_scaling = fields.number("logits_scaling", default=1.0)

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        return super().compute_logits(hidden_LD, context).div_(self._logits_scaling)

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Cut the tensors of all experts."""
        for theirs, stacked in _STACKED_EXPERTS.items():
            name = name.replace(theirs, stacked)
        return super().pieces(name, tensor)


class GraniteMoeForCausalLM(GraniteMixture):
    """Granite with experts in every layer."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        # The softmax over all experts, normalised over the chosen ones, is the softmax over these.
        routing = read_routing(fields, normalizes=True)
        layers = list(range(config.num_layers))
        moe = mixtures(config, routing, config.intermediate_size, parallel, layers)
        super().__init__(fields, config, parallel, granite_decoder(fields, config, parallel, moe=moe), layers, routing)
