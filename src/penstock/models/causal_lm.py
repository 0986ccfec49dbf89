"""Base class of causal language models.

Suffixes: T tokens of the step, L logits rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.errors import UnsupportedModel
from penstock.kernels.sampling import ChosenTokens
from penstock.layers.embedding import LMHead, VocabEmbedding
from penstock.layers.linear import restore_weights
from penstock.layers.weights import Shard, WeightSlot
from penstock.models.weights import load_into_slots


@dataclass(frozen=True, slots=True)
class StackedParameter:
    """A parameter of Transformers' model that holds the weights of several modules here, such as those of experts.

    name: of the parameter in its module. shape: outputs and inputs of each of its matrices. modules: by matrix, names
    of the modules whose weights are ranges of its outputs. outputs: the range of each of these modules.
    """

    name: str
    shape: tuple[int, int]
    modules: tuple[tuple[str, ...], ...]
    outputs: tuple[slice, ...]


class CausalLM(nn.Module, ABC):
    """Constructed with a `ModelConfig` and a `ParallelState`.

    ignorable: regular expressions for checkpoint tensors that the model has no slot for.
    features: modules of the features that the model needs (`contract.feature`).
    notes_layers: whether it passes the input of each layer to `ForwardContext.note_hidden`.
    embeds_tokens: whether it computes embeddings of tokens: on the first pipeline stage, or on all.
    """

    ignorable: ClassVar[tuple[str, ...]] = ()
    features: Sequence[str] = ()
    notes_layers: ClassVar[bool] = False
    embeds_tokens: bool = True

    @abstractmethod
    def forward(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states [T, D] from token ids (int32 or int64) and positions, which must be in range for padding too.

        With `context.last`, of those tokens only.
        """

    @abstractmethod
    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        """float32 logits [L, V]. context: of the logits rows."""

    def compute_greedy(self, hidden_LD: Tensor, context: ForwardContext) -> ChosenTokens | None:
        """Greedy tokens without materialising the logits; None without a fused kernel. context: of the logits rows."""
        return None

    def names_elsewhere(self) -> Sequence[str]:
        """Regular expressions for checkpoint tensors that belong to other pipeline stages."""
        return ()

    def is_scattered(self, num_tokens: int) -> bool:
        """Whether hidden states between layers are sequence parallel in a step of `num_tokens` tokens."""
        return False

    @abstractmethod
    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Slots of all required checkpoint tensors by name."""

    def modules_by_name(self) -> Mapping[str, tuple[nn.Module | None, Shard | None]]:
        """Modules that multiply all their inputs by one weight, by their names in Transformers, each with its shard.

        None for those of other pipeline stages. The embedding of tokens is one of them. Empty for a model that does not
        say.
        """
        return {}

    def take_embeddings(self) -> int:
        """Let embeddings that requests give replace those of tokens, where it `embeds_tokens`; returns their size.

        Raises UnsupportedModel for a model that does not say which module has the embeddings.
        """
        modules = (module for module, _ in self.modules_by_name().values())
        embedding = next((module for module in modules if isinstance(module, VocabEmbedding)), None)
        if embedding is None:
            raise UnsupportedModel(
                f"{type(self).__name__} takes no embeddings in place of tokens: its modules_by_name has no embedding "
                "of tokens. Leave enable_prompt_embeds out."
            )
        embedding.takes_embeddings = True
        return embedding.hidden_size

    def module_name(self, name: str) -> str:
        """Map a module's name in a model that shares this one's layers to one of `modules_by_name`."""
        return name

    def stacked_parameters(self) -> Mapping[str, Sequence[StackedParameter]]:
        """Stacked parameters by the name of their module in Transformers; modules are of `modules_by_name`."""
        return {}

    def is_in_head(self, module: nn.Module) -> bool:
        """Whether the module computes logits, from the logits rows alone."""
        return isinstance(module, LMHead)

    def tied_weights(self) -> Mapping[str, str]:
        """Tied weights: checkpoint name of each, and the name of the weight it is tied to."""
        return {}

    def checkpoint_name(self, name: str) -> str:
        """Map the name of an older checkpoint format to one of `checkpoint_slots`."""
        return name

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors of `checkpoint_slots` in a checkpoint's tensor, such as one with all experts."""
        yield self.checkpoint_name(name), tensor

    def joins(self, name: str) -> bool:
        """Whether `pieces` keeps a checkpoint's tensor of this name until others have come."""
        return False

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], slots: Mapping[str, WeightSlot] | None = None
    ) -> None:
        """Load all parameters from a checkpoint's tensors; may be called again with other weights.

        slots: slots by tensor name, for tensors with other names than in checkpoints of this model.

        Raises CheckpointError, naming them, for missing, unexpected, misshapen or duplicate tensors. The weights are
        then undefined. `process_weights_after_loading` follows.
        """
        restore_weights(self)
        if slots is None:
            slots = self.checkpoint_slots()
            weights = (piece for name, tensor in weights for piece in self.pieces(name, tensor))
        load_into_slots(slots, (*self.ignorable, *self.names_elsewhere()), weights)

    def check_loaded(self) -> None:
        """Check the model after `process_weights_after_loading`; for classes that are not the library's own."""
