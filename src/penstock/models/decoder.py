"""Dense decoder that most families share: layers of self-attention with rotary embedding and a gated MLP.

A family's own file reads its configuration, and has the parts of its attention and layers that differ.
Suffixes: T tokens of the step, L logits rows, D hidden size or head size, H query heads, K KV heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext, LayerAttention
from penstock.kernels.activation import GATED_ACTIVATIONS
from penstock.kernels.rotary import Rotation
from penstock.kernels.rows import sum_rows
from penstock.kernels.sampling import ChosenTokens
from penstock.layers.attention import Attention, HeadSinks
from penstock.layers.embedding import LMHead, VocabEmbedding
from penstock.layers.experts import MoE
from penstock.layers.mlp import GatedMLP
from penstock.layers.norm import (
    LayerNorm,
    NoNorm,
    QueryKeyNorm,
    RMSNorm,
    SplitWholeQueryKeyNorm,
    UnweightedQueryKeyNorm,
    WholeQueryKeyNorm,
    norm_of_stream,
)
from penstock.layers.parallel_linear import QKVParallelLinear, RowParallelLinear
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.layers.rotary import ROTATION_ROWS, LayerRotations
from penstock.layers.scalable_inputs import outputs_of
from penstock.layers.weights import Shard, WeightSlot
from penstock.models.causal_lm import CausalLM
from penstock.models.config_fields import ConfigFields
from penstock.models.weights import (
    ROTARY_BUFFERS,
    Elsewhere,
    Into,
    WeightTable,
    elsewhere,
    expand_table,
    modules_of_table,
    names_elsewhere,
    of_layers,
)
from penstock.parallel import ParallelState, layers_of_stage
from penstock.parallel.context_share import context_share
from penstock.parallel.scattered_rows import scattered_rows

# What layers with attention have, and what all have.
ATTENTION_WEIGHTS: WeightTable = {
    "model.layers.*.self_attn.q_proj": Into("model.layers.*.self_attn.qkv_proj", shard="q"),
    "model.layers.*.self_attn.k_proj": Into("model.layers.*.self_attn.qkv_proj", shard="k"),
    "model.layers.*.self_attn.v_proj": Into("model.layers.*.self_attn.qkv_proj", shard="v"),
    "model.layers.*.self_attn.o_proj": Into("model.layers.*.self_attn.o_proj"),
}
COMMON_WEIGHTS: WeightTable = {
    "model.embed_tokens": Into("model.embed_tokens"),
    "model.layers.*.input_layernorm": Into("model.layers.*.input_layernorm"),
    "model.layers.*.post_attention_layernorm": Into("model.layers.*.post_attention_layernorm"),
    "model.layers.*.mlp.gate_proj": Into("model.layers.*.mlp.gate_up_proj", shard="gate"),
    "model.layers.*.mlp.up_proj": Into("model.layers.*.mlp.gate_up_proj", shard="up"),
    "model.layers.*.mlp.down_proj": Into("model.layers.*.mlp.down_proj"),
    "model.norm": Into("model.norm"),
    "lm_head": Into("lm_head"),
}
DECODER_WEIGHTS: WeightTable = {**COMMON_WEIGHTS, **ATTENTION_WEIGHTS}
_IGNORABLE = (
    r"model\.(layers\.\d+\.self_attn\.)?" + ROTARY_BUFFERS,
    # Present in checkpoints although the LM head is tied; an untied head has a slot.
    r"lm_head\.weight",
)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Parameters of the layers, from `config.json`.

    rope: None without rotary embedding. rope_interleave: pairs of dimensions that rotate are adjacent in checkpoints.
    norm: class of the norms of hidden states. lm_head_bias: whether the LM head has a bias.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    activation: str
    norm_eps: float
    tie_word_embeddings: bool
    rope: RopeParameters | None
    rope_interleave: bool = False
    norm: type[RMSNorm | LayerNorm] = RMSNorm
    lm_head_bias: bool = False

    @classmethod
    def read(
        cls,
        fields: ConfigFields,
        *,
        default_head_size: int | None = None,
        tied_by_default: bool = False,
        activation_field: str = "hidden_act",
        default_activation: str = "silu",
        norm_eps_field: str = "rms_norm_eps",
        intermediate_size: int | None = None,
        rope: Callable[[int], RopeParameters | None] | None = None,
    ) -> DecoderConfig:
        """Raises ModelError for a missing or invalid field, UnsupportedFeature for an unsupported value.

        default_head_size: for an absent `head_dim`; None takes hidden_size / num_attention_heads.
        intermediate_size: None for that of the field. rope: reads the rotary embedding for a head size; None takes a
        plain one over whole heads.
        """
        fields.refuse_unsupported()
        hidden_size = fields.integer("hidden_size")
        num_heads = fields.integer("num_attention_heads")
        num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads != 0:
            raise fields.unsupported(
                "num_key_value_heads", num_kv_heads, f"divisors of num_attention_heads={num_heads}"
            )
        head_size = fields.integer("head_dim", default=default_head_size or hidden_size // num_heads)
        if head_size == 0:
            raise fields.unsupported("num_attention_heads", num_heads, f"up to hidden_size={hidden_size}")
        if head_size % 2 != 0:
            raise fields.unsupported("head_dim", head_size, "even numbers, since rotary embedding rotates pairs")
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=intermediate_size or fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            activation=fields.choice(activation_field, GATED_ACTIVATIONS, default_activation),
            norm_eps=fields.number(norm_eps_field),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=tied_by_default),
            rope=(
                rope(head_size)
                if rope is not None
                else read_rope_parameters(fields.hf_config, head_size=head_size, num_positions=fields.num_positions)
            ),
        )


# Makes the norm of query and key heads, from their numbers and head size.
AttentionNorm: TypeAlias = Callable[
    ..., QueryKeyNorm | UnweightedQueryKeyNorm | WholeQueryKeyNorm | SplitWholeQueryKeyNorm
]


class SelfAttention(nn.Module):
    """Attention with rotary embedding.

    scale: factor on the scores; None takes head_size ** -0.5. query_key_norm: class of the norm of query and key heads
    before rotary embedding. input_size: if it is not the hidden size. has_sinks: with attention sinks. has_gate: with
    an output gate (`QKVParallelLinear`), which a subclass applies.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        parallel: ParallelState,
        *,
        qkv_bias: bool,
        output_bias: bool,
        scale: float | None = None,
        sliding_window: int | None = None,
        chunk_size: int | None = None,
        soft_cap: float | None = None,
        query_key_norm: AttentionNorm | None = None,
        input_size: int | None = None,
        has_sinks: bool = False,
        has_gate: bool = False,
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            input_size or config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            bias=qkv_bias,
            parallel=parallel,
            is_interleaved=config.rope_interleave,
            has_gate=has_gate,
        )
        self.query_key_norm = None
        if query_key_norm is not None:
            self.query_key_norm = query_key_norm(
                num_heads=self.qkv_proj.num_heads,
                num_kv_heads=self.qkv_proj.num_kv_heads,
                head_size=config.head_size,
                eps=config.norm_eps,
            )
        self.sinks = HeadSinks(config.num_heads, config.num_kv_heads, parallel) if has_sinks else None
        self.attn = Attention(
            LayerAttention(
                f"model.layers.{layer}.self_attn.attn",
                num_heads=self.qkv_proj.num_heads,
                num_kv_heads=self.qkv_proj.num_kv_heads,
                head_size=config.head_size,
                scale=config.head_size**-0.5 if scale is None else scale,
                sliding_window=sliding_window,
                chunk_size=chunk_size,
                soft_cap=soft_cap,
                context=context_share(config.num_kv_heads, parallel),
                sinks=self.sinks,
            )
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_size, config.hidden_size, bias=output_bias, parallel=parallel
        )

    def forward(self, hidden_TD: Tensor, rotation: Rotation | None, context: ForwardContext) -> Tensor:
        qkv_TX, norm = self.qkv_proj(context.whole(hidden_TD), context.of_all_tokens()), self.query_key_norm
        if isinstance(norm, WholeQueryKeyNorm):
            qkv_TX, norm = norm.of_rows(qkv_TX), None
        mixed_TX = self.attn.from_projection(qkv_TX, norm, rotation, context)
        return self.o_proj(mixed_TX, context)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the additions are fused with the norms that follow them.

    A layer takes and returns the residual stream as two tensors, x = hidden + residual, so that the next norm can add
    them. self_attn: `SelfAttention`, or a layer called like it. input_layernorm: replaces the norm of the
    configuration. moe: replaces the MLP.
    """

    def __init__(
        self,
        config: DecoderConfig,
        self_attn: nn.Module,
        parallel: ParallelState,
        *,
        mlp_bias: bool = False,
        input_layernorm: NoNorm | None = None,
        moe: MoE | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm or config.norm(config.hidden_size, config.norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = config.norm(config.hidden_size, config.norm_eps)
        self.mlp = moe or GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=config.activation,
            bias=mlp_bias,
            parallel=parallel,
        )
        if isinstance(self_attn, SelfAttention):
            self_attn.qkv_proj.scalable_inputs = outputs_of(self.input_layernorm)
        if isinstance(self.mlp, GatedMLP):
            self.mlp.gate_up_proj.scalable_inputs = outputs_of(self.post_attention_layernorm)

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        hidden_TD, residual_TD = norm_of_stream(self.input_layernorm, hidden_TD, residual_TD)
        hidden_TD = self.self_attn(hidden_TD, rotation, context)
        residual_TD = context.narrowed(residual_TD)
        hidden_TD, residual_TD = self.post_attention_layernorm.add_and_norm(hidden_TD, residual_TD)
        return self.feed_forward(hidden_TD, context), residual_TD

    def feed_forward(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        """The output of the MLP or of the experts."""
        return self.mlp(hidden_TD, context)  # type: ignore[no-any-return]


class DecoderModel(nn.Module):
    """Embedding, layers and final norm, or this pipeline stage's part of them.

    Between stages the residual stream is sent as one tensor; under sequence parallelism each rank sends its rows.

    layer: makes a layer, such as `DecoderLayer`, from its number. ropes: rotary embedding of each layer, None for one
    without; None takes the configuration's for all. embed_tokens, norm: replace the default ones.

    num_added_rows: first layers to whose output a step may add rows (`added_rows`). gives_embeddings: whether layers
    get the embeddings of their tokens too, as a last argument, which each stage then makes.
    """

    num_added_rows = 0
    gives_embeddings = False

    def __init__(
        self,
        config: DecoderConfig,
        parallel: ParallelState,
        layer: Callable[[int], nn.Module],
        *,
        ropes: Sequence[RopeParameters | None] | None = None,
        embed_tokens: VocabEmbedding | None = None,
        norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self._stage = stage = layers_of_stage(config.num_layers, parallel)
        self._hidden_size = config.hidden_size
        self.is_first, self.is_last = stage.start == 0, stage.stop == config.num_layers
        is_at_end = self.is_last and (config.tie_word_embeddings or parallel.embeds_at_end)
        self.has_embedding = self.is_first or is_at_end or self.gives_embeddings
        self.embed_tokens = (embed_tokens or _embedding(config, parallel)) if self.has_embedding else elsewhere()
        self.rotations = LayerRotations((ropes or [config.rope] * config.num_layers)[stage.start : stage.stop])
        self.layers = nn.ModuleList(
            layer(index) if index in stage else Elsewhere() for index in range(config.num_layers)
        )
        self.norm = (norm or config.norm(config.hidden_size, config.norm_eps)) if self.is_last else elsewhere()

    def forward(
        self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, given_TD: Tensor | None = None
    ) -> Tensor:
        context = self._scattering(input_ids_T, context)
        if given_TD is None:
            hidden_TD = self._first_hidden(input_ids_T, context.of_all_tokens())
            if context.rows is not None:
                hidden_TD = context.rows.own(hidden_TD)
        else:
            hidden_TD = given_TD
        residual_TD: Tensor | None = None
        embedded = [self._embedded(input_ids_T, hidden_TD, context)] if self.gives_embeddings else []
        rows_T = context.of_all_tokens().input(ROTATION_ROWS)
        rotations = self.rotations(positions_T if rows_T is None else rows_T, hidden_TD.dtype)
        contexts = context.by_layer(len(self._stage))
        for index, rotation, of_layer in zip(self._stage, rotations, contexts, strict=True):
            context.note_hidden(index, hidden_TD, residual_TD)
            hidden_TD, residual_TD = self.layers[index](hidden_TD, residual_TD, rotation, of_layer, *embedded)
            if index < self.num_added_rows and (added_TD := of_layer.input(added_rows(index))) is not None:
                hidden_TD = sum_rows(hidden_TD, added_TD)
        context.note_hidden(self._stage.stop, hidden_TD, residual_TD)
        assert residual_TD is not None, "a decoder has at least one layer"
        if not self.is_last:
            return sum_rows(hidden_TD, residual_TD)
        hidden_TD, _ = self.norm.add_and_norm(hidden_TD, residual_TD)
        return hidden_TD if context.output_rows is None else context.whole(hidden_TD)

    def _scattering(self, input_ids_T: Tensor, context: ForwardContext) -> ForwardContext:
        """The context with a sequence-parallel layout for this step, if it has one."""
        if self.parallel.min_scattered_tokens is None:
            return context
        return replace(context, rows=scattered_rows(self.parallel, input_ids_T.shape[0]))

    def _embedded(self, input_ids_T: Tensor, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        """Embeddings beside the hidden states, which on the first stage are the same before the first layer."""
        if self.is_first:
            return sum_rows(hidden_TD, None)
        embedded_TD: Tensor = self.embed_tokens(input_ids_T, context.of_all_tokens())
        return embedded_TD if context.rows is None else context.rows.own(embedded_TD)

    def _first_hidden(self, input_ids_T: Tensor, context: ForwardContext) -> Tensor:
        """Embeddings; on later stages, whose real steps receive hidden states, zeros for a dummy step."""
        if self.is_first:
            return self.embed_tokens(input_ids_T, context)  # type: ignore[no-any-return]
        dtype = next(self.layers[self._stage.start].parameters()).dtype
        return torch.zeros(input_ids_T.shape[0], self._hidden_size, dtype=dtype, device=input_ids_T.device)


def added_rows(layer: int) -> str:
    """Name of the step input of rows that are added to a layer's output, [T, D], such as DeepStack's features."""
    return f"added_rows_{layer}"


def plain_decoder(
    config: DecoderConfig,
    parallel: ParallelState,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    windows: Sequence[int | None] | None = None,
    query_key_norm: AttentionNorm | None = None,
    has_sinks: bool = False,
    moe: Callable[[int], MoE | None] | None = None,
) -> DecoderModel:
    """Build a model of `DecoderLayer`s.

    windows: sliding window of each layer, None for full attention; None for all. moe: makes the experts of a layer, or
    None for one with an MLP; None for all.
    """

    def layer(index: int) -> DecoderLayer:
        attention = SelfAttention(
            config,
            index,
            parallel,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            sliding_window=None if windows is None else windows[index],
            query_key_norm=query_key_norm,
            has_sinks=has_sinks,
        )
        return DecoderLayer(config, attention, parallel, mlp_bias=mlp_bias, moe=None if moe is None else moe(index))

    return DecoderModel(config, parallel, layer)


class DecoderForCausalLM(CausalLM):
    """A decoder with its LM head.

    weight_table: weights of all layers. weights_of_kinds: weights that only layers of a kind have, where `layer_kinds`
    gives that of each layer, such as those with attention and those with a recurrent state.
    """

    weight_table: ClassVar[WeightTable] = DECODER_WEIGHTS
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = {}
    layer_kinds: Sequence[str] = ()
    ignorable: ClassVar[tuple[str, ...]] = _IGNORABLE
    notes_layers = True

    def __init__(self, config: DecoderConfig, parallel: ParallelState, model: DecoderModel) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.embeds_tokens = model.is_first or model.gives_embeddings
        # A stage with the embedding of a tied head keeps it in the head's layout, so that rows are the same.
        has_head = model.is_last or (model.has_embedding and config.tie_word_embeddings)
        self.lm_head = _head(config, parallel, model) if has_head else elsewhere()

    def forward(
        self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, given_TD: Tensor | None = None
    ) -> Tensor:
        """See `CausalLM`. given_TD: hidden states of the previous stage; stages before the last return such."""
        return self.model(input_ids_T, positions_T, context, given_TD)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        if not self.model.is_last:
            # A dummy step on a stage before the last.
            return hidden_LD.new_zeros(hidden_LD.shape[0], self.config.vocab_size, dtype=torch.float32)
        return self.lm_head(hidden_LD, context)  # type: ignore[no-any-return]

    def compute_greedy(self, hidden_LD: Tensor, context: ForwardContext) -> ChosenTokens | None:
        # A family that transforms its logits, for example caps them, may create ties.
        if type(self).compute_logits is not DecoderForCausalLM.compute_logits or not self.model.is_last:
            return None
        return self.lm_head.compute_greedy(hidden_LD, context)

    def is_scattered(self, num_tokens: int) -> bool:
        return scattered_rows(self.model.parallel, num_tokens) is not None

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        return expand_table(self, self._table(), self.config.num_layers)

    def names_elsewhere(self) -> Sequence[str]:
        return names_elsewhere(self, self._table(), self.config.num_layers)

    def modules_by_name(self) -> Mapping[str, tuple[nn.Module | None, Shard | None]]:
        table = {**self._table(), "lm_head": self.weight_table["lm_head"]}
        return modules_of_table(self, table, self.config.num_layers)

    def tied_weights(self) -> Mapping[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tie_word_embeddings else {}

    def _table(self) -> WeightTable:
        table = dict(self.weight_table)
        for kind, of_kind in self.weights_of_kinds.items():
            table |= of_layers(of_kind, [layer for layer, name in enumerate(self.layer_kinds) if name == kind])
        if self.config.tie_word_embeddings:
            del table["lm_head"]
        return table


def _embedding(config: DecoderConfig, parallel: ParallelState) -> VocabEmbedding:
    return VocabEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)


def _head(config: DecoderConfig, parallel: ParallelState, model: DecoderModel) -> LMHead:
    tied_to = model.embed_tokens if config.tie_word_embeddings else None
    return LMHead(config.vocab_size, config.hidden_size, bias=config.lm_head_bias, parallel=parallel, tied_to=tied_to)
