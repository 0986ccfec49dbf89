"""Inputs of decoder-only models: token ids and sequence positions."""

from __future__ import annotations

from torch import Tensor

from penstock.models.interface import ModelInputs
from penstock.runner.input_batch import InputBatch
from penstock.runner.model_states.base import ModelState


class DecoderModelState(ModelState):
    """Passes token ids and positions on unchanged."""

    keeps_inputs = True

    def inputs(self, batch: InputBatch) -> ModelInputs:
        return ModelInputs(batch.input_ids, batch.positions)

    def dummy_inputs(self, input_ids_T: Tensor, positions_T: Tensor) -> ModelInputs:
        return ModelInputs(input_ids_T, positions_T)
