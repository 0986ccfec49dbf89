"""Multi-token prediction (MTP) layer of Qwen3-Next and Qwen3.5. Suffixes: T tokens of the step, D hidden size."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.kernels.rows import concatenate_rows
from penstock.layers.linear import LinearLayer
from penstock.layers.norm import ZeroCentredRMSNorm
from penstock.models.config_fields import FULL, ConfigFields
from penstock.models.draft_head import DraftHead
from penstock.models.mixtures import expert_weights, pieces_of_experts
from penstock.models.qwen3_next import (
    GATED_ATTENTION,
    layer_maker,
    read_config,
    read_expert_routing,
    read_experts,
)
from penstock.models.qwen_moe import gated_shared_expert
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

# Fields of the number of layers, in Qwen3-Next and in Qwen3.5.
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


class Qwen3NextMTP(DraftHead):
    """MTP draft head: fc([token, hidden]), each with its own norm, then a layer with attention, and a norm.

    Its layer has experts where the target has. Its weights are in the target's checkpoint, without copies of the
    embedding and the LM head.
    """

    # Tensors of the target model.
    ignorable = (r"(?!mtp\.).*",)

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        for name in _COUNTS:
            num_layers = fields.integer(name, default=1)
            if num_layers != 1:
                raise fields.unsupported(name, num_layers, "1")
        fields.refuse_flags("mtp_use_dedicated_embeddings")
        self._num_experts = fields.count("num_experts", default=0)
        config = read_config(fields, has_mlps=self._num_experts == 0)
        super().__init__(model_config, config, parallel)
        size, eps = config.hidden_size, config.norm_eps
        self.pre_fc_norm_embedding = ZeroCentredRMSNorm(size, eps)
        self.pre_fc_norm_hidden = ZeroCentredRMSNorm(size, eps)
        self.fc = LinearLayer(2 * size, size, bias=False)
        moe = None
        if self._num_experts:
            moe = read_experts(fields, config, parallel, read_expert_routing(fields), [0])
        self.layers = nn.ModuleList([layer_maker(fields, config, parallel, [FULL], moe=moe)(0)])
        self.norm = ZeroCentredRMSNorm(size, eps)

    def forward(  # type: ignore[override]
        self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor
    ) -> Tensor:
        embed_TD = self.pre_fc_norm_embedding(self.embed(input_ids_T, context))
        both_TX = concatenate_rows(embed_TD, self.pre_fc_norm_hidden(hidden_TD))
        hidden_TD = self.fc(both_TX, context.of_all_tokens())
        rotation = self.rotation(positions_T, hidden_TD.dtype)
        hidden_TD, residual_TD = self.layers[0](hidden_TD, None, rotation, context)
        return self.norm.add_and_norm(hidden_TD, residual_TD)[0]

    def weight_table(self) -> WeightTable:
        own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        norms = ("input_layernorm", "post_attention_layernorm")
        theirs, ours = "mtp.layers.0", "layers.0"
        attention = {
            name.replace("model.layers.*", theirs): Into(into.module.replace("model.layers.*", ours), into.shard)
            for name, into in GATED_ATTENTION.items()
        }
        if self._num_experts:
            block = f"{theirs}.mlp", f"{ours}.mlp"
            mlp = {**expert_weights(*block, self._num_experts), **gated_shared_expert(*block)}
        else:
            mlp = {
                name.replace("layers.*", theirs): Into(into.module.replace("*", "0"), into.shard)
                for name, into in self.layer_weights.items()
                if ".mlp." in name
            }
        return {
            **{f"mtp.{name}": Into(name) for name in own},
            **{f"{theirs}.{name}": Into(f"{ours}.{name}") for name in norms},
            **attention,
            **mlp,
        }

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        return pieces_of_experts(self.checkpoint_name(name), tensor)
