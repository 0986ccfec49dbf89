"""BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805), RoBERTa (Liu et al. 2019) and XLM-RoBERTa as encoders.

Suffixes: T tokens of the step, L rows, D hidden size, X concatenated heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext, LayerAttention
from penstock.checkpoints.architectures import Architecture
from penstock.config import ModelConfig
from penstock.kernels.activation import ACTIVATIONS
from penstock.kernels.rows import sum_rows
from penstock.layers.attention import Attention
from penstock.layers.embedding import POSITION_IDS, VocabEmbedding
from penstock.layers.mlp import PlainMLP
from penstock.layers.norm import LayerNorm
from penstock.layers.parallel_linear import QKVParallelLinear, RowParallelLinear
from penstock.layers.weights import Shard, WeightSlot
from penstock.models.causal_lm import CausalLM
from penstock.models.config_fields import ConfigFields
from penstock.models.weights import Into, WeightTable, expand_table, modules_of_table
from penstock.parallel import ParallelState

# Step input: the number of the text in a pair, int32 per token.
TOKEN_TYPE_IDS = "token_type_ids"
_LAYER = "encoder.layer.*"
_WEIGHTS: WeightTable = {
    "embeddings.word_embeddings": Into("word_embeddings"),
    "embeddings.position_embeddings": Into("position_embeddings"),
    "embeddings.token_type_embeddings": Into("token_type_embeddings"),
    "embeddings.LayerNorm": Into("norm"),
    f"{_LAYER}.attention.self.query": Into("layers.*.qkv_proj", shard="q"),
    f"{_LAYER}.attention.self.key": Into("layers.*.qkv_proj", shard="k"),
    f"{_LAYER}.attention.self.value": Into("layers.*.qkv_proj", shard="v"),
    f"{_LAYER}.attention.output.dense": Into("layers.*.o_proj"),
    f"{_LAYER}.attention.output.LayerNorm": Into("layers.*.attention_norm"),
    f"{_LAYER}.intermediate.dense": Into("layers.*.mlp.up_proj"),
    f"{_LAYER}.output.dense": Into("layers.*.mlp.down_proj"),
    f"{_LAYER}.output.LayerNorm": Into("layers.*.mlp_norm"),
}


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Parameters of the layers, from `config.json`. first_position: row of a text's first token among the positions."""

    vocab_size: int
    num_positions: int
    num_token_types: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    norm_eps: float
    first_position: int

    @classmethod
    def read(cls, fields: ConfigFields, *, is_roberta: bool) -> BertConfig:
        """Raises ModelError for a missing or invalid field, UnsupportedFeature for an unsupported value."""
        fields.refuse_unsupported()
        fields.refuse_flags("add_cross_attention", "is_decoder")
        fields.choice("position_embedding_type", ("absolute",), default="absolute")
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if hidden_size % num_heads != 0:
            raise fields.unsupported("num_attention_heads", num_heads, f"divisors of hidden_size={hidden_size}")
        return cls(
            vocab_size=fields.integer("vocab_size"),
            num_positions=fields.integer("max_position_embeddings"),
            num_token_types=fields.integer("type_vocab_size", default=2),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            activation=fields.choice("hidden_act", ACTIVATIONS, default="gelu"),
            norm_eps=fields.number("layer_norm_eps", default=1e-12),
            first_position=1 + fields.count("pad_token_id", default=1) if is_roberta else 0,
        )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


class BertLayer(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, config: BertConfig, layer: int, parallel: ParallelState) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.qkv_proj = QKVParallelLinear(
            size, num_heads=heads, num_kv_heads=heads, head_size=config.head_size, bias=True, parallel=parallel
        )
        self.attention = Attention(
            LayerAttention(
                f"encoder.layer.{layer}.attention.self",
                num_heads=self.qkv_proj.num_heads,
                num_kv_heads=self.qkv_proj.num_kv_heads,
                head_size=config.head_size,
                scale=config.head_size**-0.5,
                is_causal=False,
            )
        )
        self.o_proj = RowParallelLinear(size, size, bias=True, parallel=parallel)
        self.attention_norm = LayerNorm(size, config.norm_eps)
        self.mlp = PlainMLP(size, config.intermediate_size, activation=config.activation, parallel=parallel)
        self.mlp_norm = LayerNorm(size, config.norm_eps)

    def forward(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        qkv_TX = self.qkv_proj(hidden_TD, context.of_all_tokens())
        mixed_TD = self.o_proj(self.attention.from_projection(qkv_TX, None, None, context), context)
        hidden_TD, _ = self.attention_norm.add_and_norm(mixed_TD, context.narrowed(hidden_TD))
        hidden_TD, _ = self.mlp_norm.add_and_norm(self.mlp(hidden_TD, context), hidden_TD)
        return hidden_TD


class BertEncoder(CausalLM):
    """Embeddings of words, positions and token types, and layers. It has no head."""

    features = ("penstock.features.encoder_inputs",)

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        super().__init__()
        architecture = Architecture.of(model_config.hf_config)
        name = architecture.encoder
        self.config = config = BertConfig.read(ConfigFields(model_config), is_roberta=name == "roberta")
        self.hidden_size = config.hidden_size
        self.first_position, self.num_token_types = config.first_position, config.num_token_types
        self.prefix = f"{name}." if architecture.has_prefix else ""
        # What the backbone of a checkpoint may have besides: an unused pooler, and position ids.
        self.ignorable = (rf"({name}\.)?pooler\..*", rf"({name}\.)?embeddings\.(position|token_type)_ids")  # type: ignore[misc]
        self.word_embeddings = VocabEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        # Small tables, which every rank has whole.
        whole, size = ParallelState(), config.hidden_size
        self.position_embeddings = VocabEmbedding(config.num_positions, size, parallel=whole)
        self.token_type_embeddings = VocabEmbedding(config.num_token_types, size, parallel=whole)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.layers = nn.ModuleList(BertLayer(config, index, parallel) for index in range(config.num_layers))

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """See `CausalLM`. Without the step inputs, as in a dummy step, all tokens are of one text."""
        of_all = context.of_all_tokens()
        position_ids_T, types_T = of_all.input(POSITION_IDS), of_all.input(TOKEN_TYPE_IDS)
        if position_ids_T is None or types_T is None:
            position_ids_T = (positions_T + self.config.first_position).clamp_max(self.config.num_positions - 1)
            types_T = torch.zeros_like(input_ids_T)
        positions_TD = self.position_embeddings(position_ids_T, of_all)
        words_TD = sum_rows(self.word_embeddings(input_ids_T, of_all), positions_TD)
        hidden_TD, _ = self.norm.add_and_norm(words_TD, self.token_type_embeddings(types_T, of_all))
        for layer, of_layer in zip(self.layers, context.by_layer(len(self.layers)), strict=True):
            hidden_TD = layer(hidden_TD, of_layer)
        return hidden_TD

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        raise NotImplementedError("an encoder has no language model head")

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        slots = expand_table(self, _WEIGHTS, self.config.num_layers)
        return {self.prefix + name: slot for name, slot in slots.items()}

    def modules_by_name(self) -> Mapping[str, tuple[nn.Module | None, Shard | None]]:
        small = ("embeddings.position_embeddings", "embeddings.token_type_embeddings")
        table = {name: into for name, into in _WEIGHTS.items() if name not in small}
        return modules_of_table(self, table, self.config.num_layers)

    def module_name(self, name: str) -> str:
        for prefix in self.encoder_prefixes:
            name = name.removeprefix(prefix)
        return name

    encoder_prefixes: ClassVar[tuple[str, ...]] = ("bert.", "roberta.")

    def checkpoint_name(self, name: str) -> str:
        """See `CausalLM`. Some checkpoints have, or lack, a prefix; the norms of old ones are gamma and beta."""
        bare = name
        for prefix in self.encoder_prefixes:
            bare = bare.removeprefix(prefix)
        if not bare.startswith(("embeddings.", "encoder.")):
            return name
        for old, new in (("gamma", "weight"), ("beta", "bias")):
            bare = bare.replace(f"LayerNorm.{old}", f"LayerNorm.{new}")
        return self.prefix + bare
