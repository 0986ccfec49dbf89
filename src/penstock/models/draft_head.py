"""Base of draft heads on a target's hidden states: EAGLE, EAGLE-3 and MTP.

At each position a head reads the target's hidden state and the next token, and predicts the token after that.
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

# Key added to a head's `config.json`: names of its checkpoint's tensors, since formats differ in their fields.
STORED_NAMES = "stored_tensor_names"


def plain_name(name: str) -> str:
    """Normalise a tensor name: some formats have a `model.` prefix, EAGLE-3 has one `midlayer`."""
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


class StoredNames:
    """Tensor names of a head's checkpoint. Without a checkpoint, those of the method's published ones."""

    def __init__(self, fields: ConfigFields) -> None:
        names = fields.hf_config.get(STORED_NAMES)
        self._names = None if names is None else frozenset(map(plain_name, names))

    def has(self, name: str, *, by_default: bool = False) -> bool:
        return by_default if self._names is None else name in self._names


class DraftHead(CausalLM):
    """Decoder layers, with the target's embedding and LM head unless the checkpoint has its own.

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
        head_vocab_size: int | None = None,
    ) -> None:
        """has_embedding: an own embedding. head_vocab_size: vocabulary of an own LM head; None shares the target's."""
        super().__init__()
        self.name = model_config.model
        self.config = config
        assert config.rope is not None, "draft heads have rotary embedding"
        self.rotation = RotaryEmbedding(config.rope)
        self.embed_tokens: VocabEmbedding | None = None
        if has_embedding:
            self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        self.lm_head: LMHead | None = None
        if head_vocab_size is not None:
            self.lm_head = LMHead(head_vocab_size, config.hidden_size, parallel=parallel)
        # In a tuple, since a module's attributes become its children.
        self._target: tuple[DecoderForCausalLM, ...] = ()

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose inputs the head reads (`AuxHiddenStates`); () for the last hidden states only."""
        return ()

    @property
    def target_size(self) -> int:
        """Hidden size of the target."""
        return self.config.hidden_size

    @abstractmethod
    def forward(  # type: ignore[override]  # it goes on from hidden states
        self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, hidden_TD: Tensor
    ) -> Tensor:
        """Hidden states for `compute_logits` and for the next draft, [T, D], or [R, D] with a narrowed context.

        input_ids_T: the token after each position. hidden_TD: from `from_target`, or the output of this for the
        position before.
        """

    def from_target(self, hidden_TD: Tensor, aux: Sequence[Tensor]) -> Tensor:
        """Make the input of `forward`, [T, D]. hidden_TD: after the target's final norm.

        aux: its auxiliary hidden states.
        """
        return hidden_TD

    def attach(self, target: object) -> None:
        """Attach to a target model and share its embedding and LM head.

        Raises UnsupportedFeature for a target without accessible hidden states, ModelError for one of another size.
        """
        if not isinstance(target, DecoderForCausalLM):
            raise UnsupportedFeature(
                f"{self.name} needs hidden states of the target, which {type(target).__name__} does not give. Use a "
                "target with a native decoder, or the method 'draft_model', 'ngram' or 'suffix'."
            )
        shares = self.embed_tokens is None or self.lm_head is None
        own = {"hidden_size": self.config.hidden_size if shares else self.target_size}
        for field, size in {**own, "vocab_size": self.config.vocab_size}.items():
            wanted = getattr(target.config, field)
            if size != wanted:
                raise ModelError(
                    f"{self.name} has {field}={size}, but the target model has {wanted}. Use a drafter that was "
                    "trained for this model."
                )
        self._target = (target,)

    @property
    def target(self) -> DecoderForCausalLM:
        assert self._target, "attach comes first"
        return self._target[0]

    def embed(self, input_ids_T: Tensor, context: ForwardContext) -> Tensor:
        embedding = self.embed_tokens or self.target.model.embed_tokens
        return embedding(input_ids_T, context.of_all_tokens())  # type: ignore[no-any-return]

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        if self.lm_head is None:
            return self.target.compute_logits(hidden_LD, context)
        return self.lm_head(hidden_LD, context)  # type: ignore[no-any-return]

    def compute_greedy(self, hidden_LD: Tensor, context: ForwardContext) -> ChosenTokens | None:
        head = self.target if self.lm_head is None else self.lm_head
        return head.compute_greedy(hidden_LD, context)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        table = dict(self.weight_table())
        for name in ("embed_tokens", "lm_head"):
            if getattr(self, name) is not None:
                table[name] = Into(name)
        return expand_table(self, table, self.config.num_layers)

    @abstractmethod
    def weight_table(self) -> WeightTable:
        """Weights other than `embed_tokens` and `lm_head`."""

    def checkpoint_name(self, name: str) -> str:
        return plain_name(name)
