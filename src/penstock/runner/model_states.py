"""Model states: builders of a model's inputs from a step's batch."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from penstock.models.interface import ModelInputs
from penstock.step.batch import InputBatch


class ModelState(ABC):
    """Builds a model's inputs from the batch's token ids and sequence positions.

    keeps_inputs: inputs built once stay valid while the batch's tensors, the same ones, take other values.
    Seeds, slots and limits go by the sequence positions, whatever positions the model is given.
    """

    keeps_inputs = False

    @abstractmethod
    def inputs(self, batch: InputBatch) -> ModelInputs:
        """Build the inputs of a step, padding rows included."""

    @abstractmethod
    def dummy_inputs(self, input_ids_T: Tensor, positions_T: Tensor) -> ModelInputs:
        """Build inputs of tokens that belong to no request."""


class DecoderModelState(ModelState):
    """Passes token ids and positions on unchanged."""

    keeps_inputs = True

    def inputs(self, batch: InputBatch) -> ModelInputs:
        return ModelInputs(batch.input_ids, batch.positions)

    def dummy_inputs(self, input_ids_T: Tensor, positions_T: Tensor) -> ModelInputs:
        return ModelInputs(input_ids_T, positions_T)
