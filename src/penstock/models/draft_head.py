"""Heads that guess on from another model's hidden states: what EAGLE, EAGLE-3 and MTP have in common.

At each position a head reads the target's hidden state there and the token after it, and guesses the one after that.
Suffixes: T tokens of the step, L logits rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.errors import ModelError, UnsupportedFeature
from penstock.kernels.sampling import ChosenTokens
from penstock.layers.embedding import LMHead, VocabEmbedding
from penstock.layers.rotary import RotaryEmbedding
from penstock.layers.weights import WeightSlot
from penstock.models.causal_lm import CausalLM
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM
from penstock.models.weights import ROTARY_BUFFERS, Into, WeightTable, expand_table
from penstock.parallel import ParallelState

# Where a head's `config.json` is told which tensors its checkpoint has, since formats differ in what they say.
STORED_NAMES = "stored_tensor_names"


def plain_name(name: str) -> str:
    """The same name for a tensor in each of the formats: some begin with `model.`, EAGLE-3 has one `midlayer`."""
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


class StoredNames:
    """Which tensors a head's checkpoint has. Without a checkpoint, those that the method's own ones have."""

    def __init__(self, fields: ConfigFields) -> None:
        names = fields.hf_config.get(STORED_NAMES)
        self._names = None if names is None else frozenset(map(plain_name, names))

    def has(self, name: str, *, by_default: bool = False) -> bool:
        return by_default if self._names is None else name in self._names


class DraftHead(CausalLM):
    """Decoder layers, and the target's embedding and output projection where the checkpoint has none of its own.

    `attach` comes before the first use.
    """

    layer_weights: ClassVar[WeightTable] = {
        "layers.*.self_attn.q_proj": Into("layers.*.self_attn.qkv_proj", shard="q"),
        "layers.*.self_attn.k_proj": Into("layers.*.self_attn.qkv_proj", shard="k"),
        "layers.*.self_attn.v_proj": Into("layers.*.self_attn.qkv_proj", shard="v"),
        "layers.*.self_attn.o_proj": Into("layers.*.self_attn.o_proj"),
        "layers.*.post_attention_layernorm": Into("layers.*.post_attention_layernorm"),
        "layers.*.mlp.gate_proj": Into("layers.*.mlp.gate_up_proj", shard="gate"),
        "layers.*.mlp.up_proj": Into("layers.*.mlp.gate_up_proj", shard="up"),
        "layers.*.mlp.down_proj": Into("layers.*.mlp.down_proj"),
    }
    ignorable: ClassVar[tuple[str, ...]] = (r"(layers\.\d+\.self_attn\.)?" + ROTARY_BUFFERS,)

    def __init__(
        self,
        model_config: ModelConfig,
        config: DecoderConfig,
        parallel: ParallelState,
        *,
        has_embedding: bool = False,
        head_size: int | None = None,
    ) -> None:
        """has_embedding: of its own. head_size: tokens that its own output projection knows; None for the target's."""
        super().__init__()
        self.name = model_config.model
        self.config = config
        self.rotation = RotaryEmbedding(config.rope)
        self.embed_tokens: VocabEmbedding | None = None
        if has_embedding:
            self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        self.lm_head: LMHead | None = None
        if head_size is not None:
            self.lm_head = LMHead(head_size, config.hidden_size, parallel=parallel)
        # In a tuple, since a module's attributes become its children.
        self._target: tuple[DecoderForCausalLM, ...] = ()

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads (`AuxHiddenStates`); () for the last hidden states only."""
        return ()

    @property
    def target_size(self) -> int:
        """Hidden size of the target."""
        return self.config.hidden_size

    @abstractmethod
    def forward(  # type: ignore[override]  # it goes on from hidden states
        self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor
    ) -> Tensor:
        """Hidden states for `compute_logits` and for the next guess, [T, D], or those that the context asks for.

        input_ids_T: the token after each position. hidden_TD: of `from_target`, or what this returned for the position
        before.
        """

    def from_target(self, hidden_TD: Tensor, aux: Sequence[Tensor]) -> Tensor:
        """What `forward` takes, [T, D]. hidden_TD: of the target, after its final norm. aux: those it wants besides."""
        return hidden_TD

    def attach(self, target: object) -> None:
        """Guess for this model, whose parts it shares.

        Raises UnsupportedFeature for one whose hidden states cannot be had, ModelError for one of another size.
        """
        if not isinstance(target, DecoderForCausalLM):
            raise UnsupportedFeature(
                f"{self.name} guesses on from hidden states, which {type(target).__name__} does not give. Use a target "
                "that is one of this project's decoders, or the method 'draft_model', 'ngram' or 'suffix'."
            )
        shares = self.embed_tokens is None or self.lm_head is None
        own = {"hidden_size": self.config.hidden_size if shares else self.target_size}
        for field, size in {**own, "vocab_size": self.config.vocab_size}.items():
            wanted = getattr(target.config, field)
            if size != wanted:
                raise ModelError(
                    f"{self.name} has {field}={size}, but the model that it guesses for has {wanted}. Use a drafter "
                    "that was trained for this model."
                )
        self._target = (target,)

    @property
    def target(self) -> DecoderForCausalLM:
        assert self._target, "attach comes first"
        return self._target[0]

    def embed(self, input_ids_T: Tensor) -> Tensor:
        embedding = self.embed_tokens or self.target.model.embed_tokens
        return embedding(input_ids_T)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_LD: Tensor) -> Tensor:
        return self.target.compute_logits(hidden_LD) if self.lm_head is None else self.lm_head(hidden_LD)

    def compute_greedy(self, hidden_LD: Tensor) -> ChosenTokens | None:
        head = self.target if self.lm_head is None else self.lm_head
        return head.compute_greedy(hidden_LD)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        table = dict(self.weight_table())
        for name in ("embed_tokens", "lm_head"):
            if getattr(self, name) is not None:
                table[name] = Into(name)
        return expand_table(self, table, self.config.num_layers)

    @abstractmethod
    def weight_table(self) -> WeightTable:
        """Beside those of `embed_tokens` and `lm_head`."""

    def checkpoint_name(self, name: str) -> str:
        return plain_name(name)
