"""ModernBERT (Warner et al. 2024, https://arxiv.org/abs/2412.13663) as an encoder.

Layers with full attention alternate with layers that see a window on either side; each kind has a rotary embedding.
Suffixes: T tokens of the step, L rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from penstock.attention import ForwardContext, LayerAttention
from penstock.checkpoints.architectures import Architecture
from penstock.config import ModelConfig
from penstock.kernels.activation import GATED_ACTIVATIONS
from penstock.kernels.rotary import Rotation
from penstock.layers.attention import Attention
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.mlp import GatedMLP
from penstock.layers.norm import LayerNorm, NoNorm, norm_of_stream
from penstock.layers.parallel_linear import QKVParallelLinear, RowParallelLinear
from penstock.layers.rope_scaling import RopeParameters
from penstock.layers.rotary import LayerRotations
from penstock.layers.weights import Shard, WeightSlot
from penstock.models.causal_lm import CausalLM
from penstock.models.config_fields import FULL, SLIDING, ConfigFields, read_layer_kinds
from penstock.models.layer_ropes import read_rope_of_kind
from penstock.models.weights import Into, WeightTable, expand_table, modules_of_table
from penstock.parallel import ParallelState

_WEIGHTS: WeightTable = {
    "embeddings.tok_embeddings": Into("tok_embeddings"),
    "embeddings.norm": Into("norm"),
    "layers.*.attn_norm": Into("layers.*.attn_norm"),
    "layers.*.attn.Wqkv": Into("layers.*.qkv_proj"),
    "layers.*.attn.Wo": Into("layers.*.o_proj"),
    "layers.*.mlp_norm": Into("layers.*.mlp_norm"),
    "layers.*.mlp.Wi": Into("layers.*.mlp.gate_up_proj"),
    "layers.*.mlp.Wo": Into("layers.*.mlp.down_proj"),
    "final_norm": Into("final_norm"),
}
# Defaults of absent fields.
_FULL_EVERY, _LOCAL_ATTENTION, _NORM_EPS = 3, 128, 1e-5
_GLOBAL_THETA, _LOCAL_THETA = 160_000.0, 10_000.0


@dataclass(frozen=True, slots=True)
class ModernBertConfig:
    """Parameters of the layers, from `config.json`. windows: by layer, as in `LayerAttention`; None for full attention.

    ropes: rotary embedding of each layer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    activation: str
    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    ropes: tuple[RopeParameters, ...]

    @classmethod
    def read(cls, fields: ConfigFields) -> ModernBertConfig:
        """Raises ModelError for a missing or invalid field, UnsupportedFeature for an unsupported value."""
        fields.refuse_unsupported()
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if hidden_size % (2 * num_heads) != 0:
            raise fields.unsupported("num_attention_heads", num_heads, f"divisors of hidden_size={hidden_size} / 2")
        if fields.hf_config.get("rope_scaling"):
            raise fields.unsupported("rope_scaling", fields.hf_config["rope_scaling"], "null")
        num_layers, every = (
            fields.integer("num_hidden_layers"),
            fields.integer("global_attn_every_n_layers", _FULL_EVERY),
        )
        kinds = read_layer_kinds(fields, [SLIDING if layer % every else FULL for layer in range(num_layers)])
        # The field counts the positions of both sides.
        window = fields.integer("local_attention", _LOCAL_ATTENTION) // 2 + 1
        if window == 1:
            raise fields.unsupported("local_attention", fields.hf_config["local_attention"], "2 or more")
        theta = fields.number("global_rope_theta", default=_GLOBAL_THETA)
        # A null base of the windows is that of full attention.
        local = theta if "local_rope_theta" in fields.hf_config else _LOCAL_THETA
        old_fields = {FULL: ("global_rope_theta", theta), SLIDING: ("local_rope_theta", local)}
        ropes = {kind: read_rope_of_kind(fields, kind, old_fields, hidden_size // num_heads) for kind in set(kinds)}
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_heads=num_heads,
            activation=fields.choice("hidden_activation", GATED_ACTIVATIONS, default="gelu"),
            norm_eps=fields.number("norm_eps", default=_NORM_EPS),
            norm_bias=fields.flag("norm_bias", default=False),
            attention_bias=fields.flag("attention_bias", default=False),
            mlp_bias=fields.flag("mlp_bias", default=False),
            windows=tuple(window if kind == SLIDING else None for kind in kinds),
            ropes=tuple(ropes[kind] for kind in kinds),
        )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    def norm(self) -> LayerNorm:
        """A norm over hidden states."""
        return LayerNorm(self.hidden_size, self.norm_eps, has_bias=self.norm_bias)


class ModernBertLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with x as two tensors, as in `DecoderLayer`.

    The first layer has no norm before attention, since the embeddings have one.
    """

    def __init__(self, config: ModernBertConfig, layer: int, parallel: ParallelState) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.attn_norm = NoNorm() if layer == 0 else config.norm()
        self.qkv_proj = QKVParallelLinear(
            size,
            num_heads=heads,
            num_kv_heads=heads,
            head_size=config.head_size,
            bias=config.attention_bias,
            parallel=parallel,
        )
        self.attention = Attention(
            LayerAttention(
                f"layers.{layer}.attn",
                num_heads=self.qkv_proj.num_heads,
                num_kv_heads=self.qkv_proj.num_kv_heads,
                head_size=config.head_size,
                scale=config.head_size**-0.5,
                is_causal=False,
                sliding_window=config.windows[layer],
            )
        )
        self.o_proj = RowParallelLinear(size, size, bias=config.attention_bias, parallel=parallel)
        self.mlp_norm = config.norm()
        self.mlp = GatedMLP(
            size, config.intermediate_size, activation=config.activation, bias=config.mlp_bias, parallel=parallel
        )

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        hidden_TD, residual_TD = norm_of_stream(self.attn_norm, hidden_TD, residual_TD)
        qkv_TX = self.qkv_proj(hidden_TD, context.of_all_tokens())
        mixed_TD = self.o_proj(self.attention.from_projection(qkv_TX, None, rotation, context), context)
        hidden_TD, residual_TD = self.mlp_norm.add_and_norm(mixed_TD, context.narrowed(residual_TD))
        return self.mlp(hidden_TD, context), residual_TD


class ModernBertEncoder(CausalLM):
    """Embeddings, layers and a final norm. It has no head."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        super().__init__()
        self.config = config = ModernBertConfig.read(ConfigFields(model_config))
        architecture = Architecture.of(model_config.hf_config)
        self.hidden_size = config.hidden_size
        self.prefix = f"{architecture.encoder}." if architecture.has_prefix else ""
        self.tok_embeddings = VocabEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        self.norm = config.norm()
        self.rotations = LayerRotations(config.ropes)
        self.layers = nn.ModuleList(ModernBertLayer(config, index, parallel) for index in range(len(config.windows)))
        self.final_norm = config.norm()

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        hidden_TD = self.norm(self.tok_embeddings(input_ids_T, context.of_all_tokens()))
        residual_TD: Tensor | None = None
        rotations = self.rotations(positions_T, hidden_TD.dtype)
        contexts = context.by_layer(len(self.layers))
        for layer, rotation, of_layer in zip(self.layers, rotations, contexts, strict=True):
            hidden_TD, residual_TD = layer(hidden_TD, residual_TD, rotation, of_layer)
        assert residual_TD is not None, "an encoder has at least one layer"
        hidden_TD, _ = self.final_norm.add_and_norm(hidden_TD, residual_TD)
        return hidden_TD

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        raise NotImplementedError("an encoder has no language model head")

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        slots = expand_table(self, _WEIGHTS, len(self.layers))
        return {self.prefix + name: slot for name, slot in slots.items()}

    def modules_by_name(self) -> Mapping[str, tuple[nn.Module | None, Shard | None]]:
        return modules_of_table(self, _WEIGHTS, len(self.layers))

    def module_name(self, name: str) -> str:
        return name.removeprefix("model.")

    own_names: ClassVar[tuple[str, ...]] = ("embeddings.", "layers.", "final_norm.")

    def checkpoint_name(self, name: str) -> str:
        """See `CausalLM`. Some checkpoints have, or lack, a prefix."""
        bare = name.removeprefix("model.")
        return self.prefix + bare if bare.startswith(self.own_names) else name
