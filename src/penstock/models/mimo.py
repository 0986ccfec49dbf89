"""MiMo (Xiaomi 2025, https://arxiv.org/abs/2505.07608): Qwen2 with a multi-token prediction (MTP) layer.

Suffixes: T tokens of the step, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.kernels.rows import concatenate_rows
from penstock.layers.linear import LinearLayer
from penstock.layers.norm import RMSNorm
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderLayer, SelfAttention
from penstock.models.draft_head import DraftHead
from penstock.models.qwen import Qwen2ForCausalLM
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The target model, without its MTP layer (`MiMoMTP`)."""

    ignorable = (*DecoderForCausalLM.ignorable, r"model\.mtp_layers\..*")


class MiMoMTP(DraftHead):
    """MTP draft head: input_proj([hidden, token]), each with its own norm, then a Qwen2 layer and a norm.

    Its weights are in the target's checkpoint. It reads the hidden states before the target's final norm.
    """

    # Tensors of the target model.
    ignorable = (r"(?!mtp_layers\.).*",)

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        num_modules = fields.integer("num_nextn_predict_layers")
        if num_modules != 1:
            raise fields.unsupported("num_nextn_predict_layers", num_modules, "1")
        super().__init__(model_config, config, parallel)
        size = config.hidden_size
        self.token_layernorm = RMSNorm(size, config.norm_eps)
        self.hidden_layernorm = RMSNorm(size, config.norm_eps)
        self.input_proj = LinearLayer(2 * size, size, bias=False)
        attention = SelfAttention(config, 0, parallel, qkv_bias=True, output_bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, attention, parallel)])
        self.final_layernorm = RMSNorm(size, config.norm_eps)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return (self.target.config.num_layers,)

    def from_target(self, hidden_TD: Tensor, aux: Sequence[Tensor]) -> Tensor:
        return aux[0]

    def forward(  # type: ignore[override]
        self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor
    ) -> Tensor:
        embed_TD = self.token_layernorm(self.embed(input_ids_T, context))
        both_TX = concatenate_rows(self.hidden_layernorm(hidden_TD), embed_TD)
        hidden_TD = self.input_proj(both_TX, context.of_all_tokens())
        rotation = self.rotation(positions_T, hidden_TD.dtype)
        hidden_TD, residual_TD = self.layers[0](hidden_TD, None, rotation, context)
        return self.final_layernorm.add_and_norm(hidden_TD, residual_TD)[0]

    def weight_table(self) -> WeightTable:
        own = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        layer = {"layers.*.input_layernorm": Into("layers.*.input_layernorm"), **self.layer_weights}
        return {f"mtp_layers.0.{name}": Into(name) for name in own} | {
            name.replace("layers.*", "mtp_layers.0"): Into(into.module.replace("*", "0"), into.shard)
            for name, into in layer.items()
        }
