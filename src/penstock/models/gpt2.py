"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

Suffixes: T tokens of the step, L logits rows, D hidden size or head size, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext, LayerAttention
from penstock.config import ModelConfig
from penstock.kernels.activation import ACTIVATIONS
from penstock.layers.attention import Attention
from penstock.layers.embedding import LMHead, VocabEmbedding
from penstock.layers.mlp import PlainMLP
from penstock.layers.norm import LayerNorm
from penstock.layers.parallel_linear import QKVParallelLinear, RowParallelLinear
from penstock.layers.scalable_inputs import outputs_of
from penstock.layers.weights import Shard, WeightSlot
from penstock.models.causal_lm import CausalLM
from penstock.models.config_fields import ConfigFields
from penstock.models.weights import (
    Elsewhere,
    Into,
    WeightTable,
    elsewhere,
    expand_table,
    modules_of_table,
    names_elsewhere,
)
from penstock.parallel import ParallelState, layers_of_stage
from penstock.parallel.context_share import context_share

# Conv1D checkpoints: matrices are [inputs, outputs].
_WEIGHTS: WeightTable = {
    "transformer.wte": Into("wte"),
    "transformer.wpe": Into("wpe"),
    "transformer.h.*.ln_1": Into("layers.*.ln_1"),
    "transformer.h.*.attn.c_attn": Into("layers.*.attn.c_attn", transposed=True),
    "transformer.h.*.attn.c_proj": Into("layers.*.attn.c_proj", transposed=True),
    "transformer.h.*.ln_2": Into("layers.*.ln_2"),
    "transformer.h.*.mlp.c_fc": Into("layers.*.mlp.up_proj", transposed=True),
    "transformer.h.*.mlp.c_proj": Into("layers.*.mlp.down_proj", transposed=True),
    "transformer.ln_f": Into("ln_f"),
    "lm_head": Into("lm_head"),
}
_PREFIX = "transformer."


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """Parameters of the layers, from `config.json`."""

    vocab_size: int
    num_positions: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    norm_eps: float
    scale_by_head_size: bool
    scale_by_layer: bool
    tie_word_embeddings: bool

    @classmethod
    def read(cls, fields: ConfigFields) -> GPT2Config:
        """Raises ModelError for a missing or invalid field, UnsupportedFeature for an unsupported value."""
        fields.refuse_unsupported()
        fields.refuse_flags("add_cross_attention")
        hidden_size, num_heads = fields.integer("n_embd"), fields.integer("n_head")
        if hidden_size % num_heads != 0:
            raise fields.unsupported("n_head", num_heads, f"divisors of n_embd={hidden_size}")
        return cls(
            vocab_size=fields.integer("vocab_size"),
            num_positions=fields.integer("n_positions"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("n_inner", default=4 * hidden_size),
            num_layers=fields.integer("n_layer"),
            num_heads=num_heads,
            activation=fields.choice("activation_function", ACTIVATIONS, default="gelu_new"),
            norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
            scale_by_head_size=fields.flag("scale_attn_weights", default=True),
            scale_by_layer=fields.flag("scale_attn_by_inverse_layer_idx", default=False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
        )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    def attention_scale(self, layer: int) -> float:
        """Factor on the scores of a layer."""
        scale = self.head_size**-0.5 if self.scale_by_head_size else 1.0
        return scale / (layer + 1) if self.scale_by_layer else scale


class GPT2Attention(nn.Module):
    """Attention without rotary embedding: positions are embedded with the tokens."""

    def __init__(self, config: GPT2Config, layer: int, parallel: ParallelState) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.c_attn = QKVParallelLinear(
            config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_size=config.head_size,
            bias=True,
            parallel=parallel,
        )
        self.attn = Attention(
            LayerAttention(
                f"transformer.h.{layer}.attn",
                num_heads=self.c_attn.num_heads,
                num_kv_heads=self.c_attn.num_kv_heads,
                head_size=config.head_size,
                scale=config.attention_scale(layer),
                context=context_share(config.num_heads, parallel),
            )
        )
        self.c_proj = RowParallelLinear(config.hidden_size, config.hidden_size, bias=True, parallel=parallel)

    def forward(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        heads_THD = self.c_attn(hidden_TD, context.of_all_tokens()).view(hidden_TD.shape[0], -1, self.head_size)
        query_THD, key_THD, value_THD = heads_THD.chunk(3, 1)
        mixed_TX = self.attn(query_THD, key_THD, value_THD, context).flatten(1)
        return self.c_proj(mixed_TX, context)  # type: ignore[no-any-return]


class GPT2Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); overwrites x."""

    def __init__(self, config: GPT2Config, layer: int, parallel: ParallelState) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = GPT2Attention(config, layer, parallel)
        self.ln_2 = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = PlainMLP(
            config.hidden_size, config.intermediate_size, activation=config.activation, parallel=parallel
        )
        self.attn.c_attn.scalable_inputs = outputs_of(self.ln_1)
        self.mlp.up_proj.scalable_inputs = outputs_of(self.ln_2)

    def forward(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        mixed_TD = self.attn(self.ln_1(hidden_TD), context)
        hidden_TD = context.narrowed(hidden_TD).add_(mixed_TD)
        return hidden_TD.add_(self.mlp(self.ln_2(hidden_TD), context))


class GPT2LMHeadModel(CausalLM):
    """Token and position embeddings, layers, final norm, and an LM head that is usually tied."""

    ignorable: ClassVar[tuple[str, ...]] = (
        # Causal masks in old checkpoints.
        r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
        # Present in checkpoints although the LM head is tied; an untied head has a slot.
        r"lm_head\.weight",
    )
    notes_layers = True

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        super().__init__()
        self.config = config = GPT2Config.read(ConfigFields(model_config))
        self._stage = stage = layers_of_stage(config.num_layers, parallel)
        self.embeds_tokens, self.is_last = stage.start == 0, stage.stop == config.num_layers
        has_embedding = self.embeds_tokens or (self.is_last and config.tie_word_embeddings)
        self.wte = _embedding(config.vocab_size, config, parallel) if has_embedding else elsewhere()
        # Position embeddings are replicated on all ranks of the first stage.
        self.wpe = _embedding(config.num_positions, config, ParallelState()) if self.embeds_tokens else elsewhere()
        self.layers = nn.ModuleList(
            GPT2Layer(config, index, parallel) if index in stage else Elsewhere() for index in range(config.num_layers)
        )
        self.ln_f = LayerNorm(config.hidden_size, config.norm_eps) if self.is_last else elsewhere()
        # A stage with the embedding of a tied head keeps it in the head's layout, so that rows are the same.
        has_head = self.is_last or (self.embeds_tokens and config.tie_word_embeddings)
        self.lm_head = _head(config, parallel, self.wte) if has_head else elsewhere()

    def forward(
        self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, given_TD: Tensor | None = None
    ) -> Tensor:
        """See `CausalLM`. given_TD: hidden states of the previous stage; stages before the last return such."""
        if given_TD is None:
            given_TD = self._first_hidden(input_ids_T, positions_T, context.of_all_tokens())
        hidden_TD = given_TD
        for index, of_layer in zip(self._stage, context.by_layer(len(self._stage)), strict=True):
            context.note_hidden(index, hidden_TD, None)
            hidden_TD = self.layers[index](hidden_TD, of_layer)
        context.note_hidden(self._stage.stop, hidden_TD, None)
        return self.ln_f(hidden_TD) if self.is_last else hidden_TD

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        if not self.is_last:
            # A dummy step on a stage before the last.
            return hidden_LD.new_zeros(hidden_LD.shape[0], self.config.vocab_size, dtype=torch.float32)
        return self.lm_head(hidden_LD, context)  # type: ignore[no-any-return]

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        return expand_table(self, self._table(), self.config.num_layers)

    def names_elsewhere(self) -> Sequence[str]:
        return names_elsewhere(self, self._table(), self.config.num_layers)

    def modules_by_name(self) -> Mapping[str, tuple[nn.Module | None, Shard | None]]:
        table = {name: into for name, into in _WEIGHTS.items() if into.module != "wpe"}
        return modules_of_table(self, table, self.config.num_layers)

    def tied_weights(self) -> Mapping[str, str]:
        return {"lm_head.weight": "transformer.wte.weight"} if self.config.tie_word_embeddings else {}

    def checkpoint_name(self, name: str) -> str:
        """See `CausalLM`. OpenAI's own checkpoints lack the prefix."""
        return name if name.startswith((_PREFIX, "lm_head.")) else _PREFIX + name

    def _table(self) -> WeightTable:
        table = dict(_WEIGHTS)
        if self.config.tie_word_embeddings:
            del table["lm_head"]
        return table

    def _first_hidden(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """Embeddings; on later stages, whose real steps receive hidden states, zeros for a dummy step."""
        if self.embeds_tokens:
            tokens_TD, positions_TD = self.wte(input_ids_T, context), self.wpe(positions_T, context)
            return tokens_TD.add_(positions_TD)  # type: ignore[no-any-return]
        weight = next(self.layers[self._stage.start].parameters())
        return weight.new_zeros(input_ids_T.shape[0], self.config.hidden_size)


def _embedding(num_rows: int, config: GPT2Config, parallel: ParallelState) -> VocabEmbedding:
    return VocabEmbedding(num_rows, config.hidden_size, parallel=parallel)


def _head(config: GPT2Config, parallel: ParallelState, embedding: VocabEmbedding) -> LMHead:
    tied_to = embedding if config.tie_word_embeddings else None
    return LMHead(config.vocab_size, config.hidden_size, parallel=parallel, tied_to=tied_to)
