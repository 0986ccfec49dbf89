"""Models that take token ids, and positions as the sequence has them."""

from __future__ import annotations

from torch import Tensor

from penstock.models.interface import ModelInputs
from penstock.runner.input_batch import InputBatch
from penstock.runner.model_states.base import ModelState


class DecoderModelState(ModelState):
    """Hands on what the batch has. A batch that is filled anew has the same tensors, and so the same inputs."""

    def __init__(self) -> None:
        self._batch: InputBatch | None = None
        self._inputs: ModelInputs

    def inputs(self, batch: InputBatch) -> ModelInputs:
        if batch is not self._batch:
            self._batch, self._inputs = batch, ModelInputs(batch.input_ids, batch.positions)
        return self._inputs

    def dummy_inputs(self, input_ids_T: Tensor, positions_T: Tensor) -> ModelInputs:
        return ModelInputs(input_ids_T, positions_T)
