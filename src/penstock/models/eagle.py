"""EAGLE (Li et al. 2024, https://arxiv.org/abs/2401.15077): a draft head on the target's last hidden states,
usually one layer. Suffixes: T tokens of the step, D hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.kernels.rows import concatenate_rows, sum_rows
from penstock.layers.linear import LinearLayer
from penstock.layers.norm import NoNorm
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderLayer, SelfAttention
from penstock.models.draft_head import DraftHead, StoredNames
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState


class EagleLlamaForCausalLM(DraftHead):
    """fc(cat(embedding, hidden)), then Llama layers; layer 0 has an input norm only if the checkpoint does."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        stored = StoredNames(fields)
        config = DecoderConfig.read(fields)
        super().__init__(
            model_config,
            config,
            parallel,
            has_embedding=stored.has("embed_tokens.weight"),
            head_vocab_size=config.vocab_size if stored.has("lm_head.weight") else None,
        )
        self.fc = LinearLayer(2 * config.hidden_size, config.hidden_size, bias=stored.has("fc.bias"))

        def layer(index: int) -> DecoderLayer:
            attention = SelfAttention(
                config,
                index,
                parallel,
                qkv_bias=stored.has("layers.0.self_attn.q_proj.bias"),
                output_bias=stored.has("layers.0.self_attn.o_proj.bias"),
            )
            has_norm = index > 0 or stored.has("layers.0.input_layernorm.weight")
            return DecoderLayer(
                config,
                attention,
                parallel,
                mlp_bias=stored.has("layers.0.mlp.gate_proj.bias"),
                input_layernorm=None if has_norm else NoNorm(),
            )

        self.layers = nn.ModuleList(layer(index) for index in range(config.num_layers))

    def forward(  # type: ignore[override]
        self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor
    ) -> Tensor:
        both_TX = concatenate_rows(self.embed(input_ids_T, context), hidden_TD)
        hidden_TD = self.fc(both_TX, context.of_all_tokens())
        residual_TD: Tensor | None = None
        rotation = self.rotation(positions_T, hidden_TD.dtype)
        for layer, of_layer in zip(self.layers, context.by_layer(len(self.layers)), strict=True):
            hidden_TD, residual_TD = layer(hidden_TD, residual_TD, rotation, of_layer)
        assert residual_TD is not None, "a head has at least one layer"
        return sum_rows(hidden_TD, residual_TD)

    def weight_table(self) -> WeightTable:
        norms = {
            f"layers.{index}.input_layernorm": Into(f"layers.{index}.input_layernorm")
            for index, layer in enumerate(self.layers)
            if not isinstance(layer.input_layernorm, NoNorm)
        }
        return {"fc": Into("fc"), **norms, **self.layer_weights}
