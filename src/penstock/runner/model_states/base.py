"""The interface of what makes a model's inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from penstock.models.interface import ModelInputs
from penstock.runner.input_batch import InputBatch


class ModelState(ABC):
    """Makes what one model is called with, of what every model's batch has: token ids and positions in the sequence.

    keeps_inputs: inputs that were made once stay good while the batch's tensors, the same ones, hold other values.
    Those positions stay what seeds, slots and limits go by, whatever positions the model is given.
    """

    keeps_inputs = False

    @abstractmethod
    def inputs(self, batch: InputBatch) -> ModelInputs:
        """The inputs of a step, for rows of padding too."""

    @abstractmethod
    def dummy_inputs(self, input_ids_T: Tensor, positions_T: Tensor) -> ModelInputs:
        """The inputs of as many tokens that belong to no request."""
