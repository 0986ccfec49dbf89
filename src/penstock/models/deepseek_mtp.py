"""Multi-token prediction (MTP) layer of DeepSeek V3 and R1 (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

Suffixes: T tokens of the step, L logits rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.kernels.rows import concatenate_rows
from penstock.layers.latent_attention import LatentAttention
from penstock.layers.linear import LinearLayer
from penstock.layers.norm import RMSNorm
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderLayer
from penstock.models.deepseek import deepseek_experts, latent_weights, read_latent_attention
from penstock.models.draft_head import DraftHead
from penstock.models.glm4_moe import read_grouped_routing
from penstock.models.mixtures import expert_weights
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState


class DeepSeekMTP(DraftHead):
    """MTP draft head: eh_proj([token, hidden]), each with its own norm, then a layer with experts and a norm.

    Its weights are those of the layer after the target's last one, in the target's checkpoint. It shares the target's
    embedding and LM head, of which that layer has copies.
    """

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config, sizes, has_bias = read_latent_attention(fields)
        num_modules = fields.integer("num_nextn_predict_layers")
        if num_modules != 1:
            raise fields.unsupported("num_nextn_predict_layers", num_modules, "1")
        super().__init__(model_config, config, parallel)
        size, self._routing = config.hidden_size, read_grouped_routing(fields)
        self._has_query_latent = sizes.q_lora_rank is not None
        self.enorm = RMSNorm(size, config.norm_eps)
        self.hnorm = RMSNorm(size, config.norm_eps)
        self.eh_proj = LinearLayer(2 * size, size, bias=False)
        attention = LatentAttention(sizes, size, 0, parallel, bias=has_bias)
        moe = deepseek_experts(fields, config, self._routing, parallel, [0], has_correction=True)
        self.layers = nn.ModuleList([DecoderLayer(config, attention, parallel, moe=moe(0))])
        self.norm = RMSNorm(size, config.norm_eps)

    def forward(  # type: ignore[override]
        self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor
    ) -> Tensor:
        embed_TD = self.enorm(self.embed(input_ids_T, context))
        hidden_TD = self.eh_proj(concatenate_rows(embed_TD, self.hnorm(hidden_TD)), context.of_all_tokens())
        rotation = self.rotation(positions_T, hidden_TD.dtype)
        hidden_TD, residual_TD = self.layers[0](hidden_TD, None, rotation, context)
        return self.norm.add_and_norm(hidden_TD, residual_TD)[0]

    def names_elsewhere(self) -> Sequence[str]:
        """Names of the target's tensors, and of the layer's copies."""
        copies = r"(embed_tokens|shared_head\.head)\.weight"
        return [rf"(?!{self._stored}\.).*", rf"{self._stored}\.{copies}"]

    def weight_table(self) -> WeightTable:
        stored, ours = self._stored, "layers.0"
        layer = self.layers[0]
        own = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"}
        norms = ("input_layernorm", "post_attention_layernorm")
        has_shared = layer.mlp.shared_expert is not None  # type: ignore[union-attr]
        return {
            **{f"{stored}.{name}": Into(module) for name, module in own.items()},
            **{f"{stored}.{name}": Into(f"{ours}.{name}") for name in norms},
            **latent_weights(stored, ours, has_query_latent=self._has_query_latent),
            **expert_weights(f"{stored}.mlp", f"{ours}.mlp", self._routing.num_experts, has_shared=has_shared),
        }

    @property
    def _stored(self) -> str:
        """The layer's name in the checkpoint."""
        return f"layers.{self.config.num_layers}"
