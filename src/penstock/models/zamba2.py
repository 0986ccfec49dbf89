"""Zamba2 (Zyphra 2024, https://arxiv.org/abs/2411.15242): Mamba 2, and a few blocks with attention in many places.

A block's output is added to the input of a state-space layer. Places that share a block differ in low-rank additions to
its projections. Suffixes: T tokens of the step, D hidden size, X features of several heads or of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from penstock.attention import ForwardContext, LayerAttention
from penstock.config import ModelConfig
from penstock.kernels.activation import GATED_ACTIVATIONS
from penstock.kernels.rotary import Rotation
from penstock.kernels.rows import columns, concatenate_rows, sum_rows
from penstock.layers.attention import Attention
from penstock.layers.linear import LinearLayer
from penstock.layers.norm import RMSNorm, norm_of_stream
from penstock.layers.parallel_linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from penstock.layers.recurrence.state_space import StateSpace, StateSpaceMixer
from penstock.layers.rope_scaling import read_rope_parameters
from penstock.layers.weights import Shard
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderModel
from penstock.models.mamba_fields import STATE_SPACE, checked, read_hybrid_kinds, state_space_weights
from penstock.models.weights import Elsewhere, Into, WeightTable
from penstock.parallel import ParallelState, Share
from penstock.parallel.context_share import context_share

HYBRID = "hybrid"
_KINDS = {"mamba": STATE_SPACE, STATE_SPACE: STATE_SPACE, HYBRID: HYBRID}
# Of the norms in state-space layers, whatever the other norms have.
_STATE_NORM_EPS = 1e-5
_LAYER, _BLOCK = "model.layers.*", "shared_transformer"
# Weights of a block, by their names under `shared_transformer`.
_BLOCK_WEIGHTS: WeightTable = {
    "input_layernorm": Into("input_layernorm"),
    "pre_ff_layernorm": Into("pre_ff_layernorm"),
    **{f"self_attn.{shard}_proj": Into("qkv_proj", shard=shard) for shard in "qkv"},
    "self_attn.o_proj": Into("o_proj"),
    "feed_forward.gate_up_proj": Into("gate_up_proj"),
    "feed_forward.down_proj": Into("down_proj"),
}


class SharedBlock(nn.Module):
    """Projections and norms of attention and an MLP, of several places.

    The attention's input is twice as wide as the hidden states.
    """

    def __init__(self, config: DecoderConfig, parallel: ParallelState, *, bias: bool) -> None:
        super().__init__()
        hidden_size, middle = config.hidden_size, config.intermediate_size
        self.input_layernorm = RMSNorm(2 * hidden_size, config.norm_eps)
        self.qkv_proj = QKVParallelLinear(
            2 * hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            bias=False,
            parallel=parallel,
        )
        self.o_proj = RowParallelLinear(config.num_heads * config.head_size, hidden_size, bias=False, parallel=parallel)
        self.pre_ff_layernorm = RMSNorm(hidden_size, config.norm_eps)
        self.gate_up_proj = MergedColumnParallelLinear.of_sizes(
            hidden_size, {"gate": middle, "up": middle}, bias=bias, parallel=parallel
        )
        self.down_proj = RowParallelLinear(middle, hidden_size, bias=bias, parallel=parallel)
        self.activate_and_mul = GATED_ACTIVATIONS[config.activation]


class AttentionAdditions(nn.Module):
    """Low-rank additions to queries, keys and values of a place: up(down(x)) each, [T, X] side by side."""

    def __init__(self, config: DecoderConfig, rank: int, features: Share, parallel: ParallelState) -> None:
        super().__init__()
        self.rank, of_all = rank, Share(0, rank, rank)
        shares: dict[Shard, Share] = dict.fromkeys("qkv", of_all)
        self.down = MergedColumnParallelLinear(2 * config.hidden_size, shares, bias=False)
        self.q, self.k, self.v = (
            ColumnParallelLinear(rank, features.whole, bias=False, parallel=parallel, share=features) for _ in range(3)
        )

    def forward(self, normed_TX: Tensor, context: ForwardContext) -> Tensor:
        reduced_TX, rank = self.down(normed_TX, context), self.rank
        query_TX, key_TX, value_TX = (
            up(columns(reduced_TX, index * rank, rank), context) for index, up in enumerate((self.q, self.k, self.v))
        )
        return concatenate_rows(concatenate_rows(query_TX, key_TX), value_TX)


class MLPAdditions(nn.Module):
    """Low-rank additions to gate and up projections of a place: up(down(x)), [T, X]."""

    def __init__(self, config: DecoderConfig, rank: int, parallel: ParallelState) -> None:
        super().__init__()
        sizes = {"gate": config.intermediate_size, "up": config.intermediate_size}
        self.down = LinearLayer(config.hidden_size, rank, bias=False)
        self.up = MergedColumnParallelLinear.of_sizes(rank, sizes, bias=False, parallel=parallel)

    def forward(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        return self.up(self.down(hidden_TD, context), context)  # type: ignore[no-any-return]


class Place(nn.Module):
    """A block in the place before a state-space layer: linear(mlp(norm(attention(norm(x, embeddings))))).

    attention_rank: of the additions to the attention's projections; None for none. mlp_rank: likewise of the MLP.
    """

    def __init__(
        self,
        block: SharedBlock,
        config: DecoderConfig,
        layer: int,
        parallel: ParallelState,
        *,
        attention_rank: int | None,
        mlp_rank: int,
    ) -> None:
        super().__init__()
        self.block, projection = block, block.qkv_proj
        self.attn = Attention(
            LayerAttention(
                f"model.layers.{layer}.self_attn.attn",
                num_heads=projection.num_heads,
                num_kv_heads=projection.num_kv_heads,
                head_size=config.head_size,
                # Half of a head is of the embeddings.
                scale=(config.head_size / 2) ** -0.5,
                context=context_share(config.num_kv_heads, parallel),
            )
        )
        self.attention_additions = None
        if attention_rank is not None:
            features = projection.output_shares["q"]
            self.attention_additions = AttentionAdditions(config, attention_rank, features, parallel)
        self.mlp_additions = MLPAdditions(config, mlp_rank, parallel)
        self.linear = LinearLayer(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, hidden_TD: Tensor, embedded_TD: Tensor, rotation: Rotation | None, context: ForwardContext
    ) -> Tensor:
        """The block's output, which is added to the input of the state-space layer: of all tokens, [T, D]."""
        block = self.block
        normed_TX = context.whole(block.input_layernorm(concatenate_rows(hidden_TD, embedded_TD)))
        qkv_TX = block.qkv_proj(normed_TX, context)
        if self.attention_additions is not None:
            qkv_TX = sum_rows(qkv_TX, self.attention_additions(normed_TX, context))
        attended_TD = block.o_proj(self.attn.from_projection(qkv_TX, None, rotation, context), context)
        normed_TD = context.whole(block.pre_ff_layernorm(attended_TD))
        gate_up_TX = sum_rows(block.gate_up_proj(normed_TD, context), self.mlp_additions(normed_TD, context))
        return self.linear(block.down_proj(block.activate_and_mul(gate_up_TX), context), context)  # type: ignore[no-any-return]


class Zamba2Layer(nn.Module):
    """x + mixer(norm(x)), or x + mixer(norm(x + place(x, embeddings)))."""

    def __init__(self, norm: RMSNorm, mixer: StateSpaceMixer, place: Place | None) -> None:
        super().__init__()
        self.norm, self.mixer, self.place = norm, mixer, place

    def forward(
        self,
        hidden_TD: Tensor,
        residual_TD: Tensor | None,
        rotation: Rotation | None,
        context: ForwardContext,
        embedded_TD: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Output and residual, whose sum is the residual stream."""
        if self.place is None:
            normed_TD, residual_TD = norm_of_stream(self.norm, hidden_TD, residual_TD)
        else:
            residual_TD = hidden_TD if residual_TD is None else sum_rows(hidden_TD, residual_TD)
            placed_TD = self.place(residual_TD, embedded_TD, rotation, context.of_all_tokens())
            normed_TD = self.norm(sum_rows(placed_TD, residual_TD))
        hidden_TD = self.mixer(normed_TD, rotation, context)
        return hidden_TD, context.narrowed(residual_TD)


class Zamba2Model(DecoderModel):
    """Layers that get the embeddings of their tokens too. blocks: `Elsewhere` if no layer of this stage has it."""

    gives_embeddings = True
    blocks: nn.ModuleList


class Zamba2ForCausalLM(DecoderForCausalLM):
    """State-space layers, before some of which a shared block with attention comes."""

    weight_table: ClassVar[WeightTable] = {
        "model.embed_tokens": Into("model.embed_tokens"),
        "model.final_layernorm": Into("model.norm"),
        "lm_head": Into("lm_head"),
    }
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = {
        STATE_SPACE: {
            f"{_LAYER}.input_layernorm": Into(f"{_LAYER}.norm"),
            **state_space_weights(f"{_LAYER}.mamba", f"{_LAYER}.mixer"),
        },
        HYBRID: {
            f"{_LAYER}.linear": Into(f"{_LAYER}.place.linear"),
            f"{_LAYER}.mamba_decoder.input_layernorm": Into(f"{_LAYER}.norm"),
            **state_space_weights(f"{_LAYER}.mamba_decoder.mamba", f"{_LAYER}.mixer"),
        },
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = _read_config(fields)
        kinds = read_hybrid_kinds(fields, config.num_layers, _KINDS)
        if kinds is None:
            raise fields.unsupported("layers_block_type", None, f"a list of {', '.join(_KINDS)}, one per layer")
        sizes, bias = _read_sizes(fields, config), fields.flag("add_bias_linear", default=False)
        rank, num_blocks = fields.integer("adapter_rank", default=128), fields.integer("num_mem_blocks", default=1)
        self._hybrid = [layer for layer, kind in enumerate(kinds) if kind == HYBRID]
        self._num_blocks = min(num_blocks, len(self._hybrid))
        self._has_additions = fields.flag("use_shared_attention_adapter", default=False)
        if self._has_additions and config.num_kv_heads != config.num_heads:
            raise fields.unsupported(
                "num_key_value_heads", config.num_kv_heads, f"num_attention_heads={config.num_heads}, with adapters"
            )
        blocks: dict[int, SharedBlock] = {}

        def place(index: int) -> Place:
            number = self._hybrid.index(index) % num_blocks
            if number not in blocks:
                blocks[number] = SharedBlock(config, parallel, bias=bias)
            ranks = rank if self._has_additions else None
            return Place(blocks[number], config, index, parallel, attention_rank=ranks, mlp_rank=rank)

        def layer(index: int) -> Zamba2Layer:
            mixer = StateSpaceMixer(config.hidden_size, sizes, name=f"model.layers.{index}.mixer", parallel=parallel)
            of_layer = place(index) if kinds[index] == HYBRID else None
            return Zamba2Layer(RMSNorm(config.hidden_size, config.norm_eps), mixer, of_layer)

        model = Zamba2Model(config, parallel, layer)
        model.blocks = nn.ModuleList(blocks.get(number) or Elsewhere() for number in range(self._num_blocks))
        super().__init__(config, parallel, model)
        self.layer_kinds = kinds

    def names_elsewhere(self) -> Sequence[str]:
        """The blocks' weights may be there once more for each place."""
        again = [rf"model\.layers\.{layer}\.{_BLOCK}\..*" for layer in self._hybrid[self._num_blocks :]]
        return [*super().names_elsewhere(), *again]

    def modules_by_name(self) -> Mapping[str, tuple[nn.Module | None, Shard | None]]:
        """Without the blocks: adapters are of one place each."""
        return {name: found for name, found in super().modules_by_name().items() if f".{_BLOCK}." not in name}

    def _table(self) -> WeightTable:
        table = dict(super()._table())
        for number in range(self._num_blocks):
            theirs = f"model.layers.{self._hybrid[number]}.{_BLOCK}"
            for name, into in _BLOCK_WEIGHTS.items():
                table[f"{theirs}.{name}"] = Into(f"model.blocks.{number}.{into.module}", into.shard)
        for use, layer in enumerate(self._hybrid):
            theirs = f"model.layers.{self._hybrid[use % self._num_blocks]}.{_BLOCK}"
            ours = f"model.layers.{layer}.place"
            mlp = f"{theirs}.feed_forward.gate_up_proj_adapter_list.{use}"
            table |= {f"{mlp}.{part}": Into(f"{ours}.mlp_additions.{name}") for part, name in enumerate(("down", "up"))}
            for shard in "qkv" if self._has_additions else "":
                of_shard = f"{theirs}.self_attn.linear_{shard}_adapter_list.{use}"
                table[f"{of_shard}.0"] = Into(f"{ours}.attention_additions.down", shard=shard)
                table[f"{of_shard}.1"] = Into(f"{ours}.attention_additions.{shard}")
        return table


def _read_config(fields: ConfigFields) -> DecoderConfig:
    fields.refuse_unsupported()
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads", default=32)
    head_size, has_rope = 2 * hidden_size // num_heads, fields.flag("use_mem_rope", default=False)
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", default=4 * hidden_size),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=num_heads),
        head_size=head_size,
        activation=fields.choice("hidden_act", GATED_ACTIVATIONS, "gelu"),
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
        rope=(
            read_rope_parameters(fields.hf_config, head_size=head_size, num_positions=fields.num_positions)
            if has_rope
            else None
        ),
    )


def _read_sizes(fields: ConfigFields, config: DecoderConfig) -> StateSpace:
    inner_size = int(fields.number("mamba_expand", default=2) * config.hidden_size)
    num_heads, bias = fields.integer("n_mamba_heads", default=8), fields.flag("add_bias_linear", default=False)
    sizes = StateSpace(
        num_heads=num_heads,
        head_size=inner_size // num_heads,
        num_groups=fields.integer("mamba_ngroups", default=1),
        state_size=fields.integer("mamba_d_state", default=64),
        kernel_size=fields.integer("mamba_d_conv", default=4),
        min_step=fields.number("time_step_min", default=0.001),
        bias=bias,
        output_bias=bias,
        norm_eps=_STATE_NORM_EPS,
    )
    return checked(fields, inner_size, sizes)
