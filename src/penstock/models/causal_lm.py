"""What every model here is: a module that turns tokens into logits, and that takes weights one way only.

Suffixes: T tokens of the step, L logits rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.kernels.sampling import ChosenTokens
from penstock.layers.linear import restore_weights
from penstock.layers.weights import WeightSlot
from penstock.models.weights import load_into_slots


class CausalLM(nn.Module, ABC):
    """Constructed with a `ModelConfig` and a `ParallelState`.

    ignorable: regular expressions for tensors that checkpoints may hold although the model has no slot for them.
    """

    ignorable: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def forward(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states [T, D] from token ids (int32 or int64) and positions, which padding too must have in range.

        Where `context.last` is given: of those tokens only.
        """

    @abstractmethod
    def compute_logits(self, hidden_LD: Tensor) -> Tensor:
        """float32 logits [L, V]."""

    def compute_greedy(self, hidden_LD: Tensor) -> ChosenTokens | None:
        """The greedy choice of those logits without writing them down; None where there is no way to."""
        return None

    def names_elsewhere(self) -> Sequence[str]:
        """Regular expressions for tensors of the checkpoint that other stages of the pipeline have places for."""
        return ()

    def is_scattered(self, num_tokens: int) -> bool:
        """Whether each rank keeps some tokens only of what is between the layers of a step of so many."""
        return False

    @abstractmethod
    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Every tensor that a checkpoint of this model must hold, by name, with the place it fills."""

    def tied_weights(self) -> Mapping[str, str]:
        """By name in the checkpoint, each weight that the configuration ties, and the name of the one it is tied to."""
        return {}

    def checkpoint_name(self, name: str) -> str:
        """The name among `checkpoint_slots` of a tensor that checkpoints may have under an older one."""
        return name

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], slots: Mapping[str, WeightSlot] | None = None
    ) -> None:
        """Fill all parameters from a checkpoint's tensors; may be called again with other weights.

        slots: what the tensors fill, by name, where their names are not those of a checkpoint of this model.

        Raises CheckpointError, naming them, when some are missing, unexpected, misshapen or duplicate. The weights
        are then undefined. Afterwards `process_weights_after_loading` makes the model fast.
        """
        restore_weights(self)
        if slots is None:
            slots = self.checkpoint_slots()
            weights = ((self.checkpoint_name(name), tensor) for name, tensor in weights)
        load_into_slots(slots, (*self.ignorable, *self.names_elsewhere()), weights)
