"""Pooling of texts: embeddings, classes and scores, and vectors of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.config.pooling import TOKEN_TASKS
from penstock.contract import PoolingParams
from penstock.features.pooling.base import PoolingHead
from penstock.features.pooling.states import AllTokens, Pooled, PoolingStates
from penstock.models.interface import LanguageModel
from penstock.models.pooling import PoolingModel
from penstock.runner.output_heads.base import HeadServices
from penstock.step.frame import Frame, RowOutput, WantedOutputs


class TextPooling(PoolingHead):
    """Output head of `PoolingModel`s. Prompts in chunks are pooled as whole ones."""

    def __init__(self, services: HeadServices) -> None:
        super().__init__(services)
        states = services.owners.of_type(PoolingStates)
        assert states is not None, "the runner of a pooling model has its states"
        self._states = states

    def wants(self, frame: Frame) -> WantedOutputs:
        pooled = self._states.pooled
        needs_all = any(pooled[slot].needs_all for slot in frame.batch.layout.slots_np.tolist())
        return WantedOutputs(None if needs_all else RowOutput.HIDDEN, all_rows=needs_all)

    def pool(self, frame: Frame, is_complete: Sequence[bool]) -> list[Tensor | None]:
        layout, model = frame.batch.layout, frame.model
        assert isinstance(model, PoolingModel), "the head belongs to pooling models"
        vectors: list[Tensor | None] = []
        starts = layout.query_start_loc_np
        for index, (slot, complete) in enumerate(zip(layout.slots_np.tolist(), is_complete, strict=True)):
            if frame.all_hidden is not None:
                rows = frame.all_hidden[starts[index] : starts[index + 1]]
            else:
                assert frame.hidden is not None, "either all rows were wanted, or those of last tokens"
                rows = frame.hidden[index : index + 1]
            pooled = self._states.pooled[slot]
            pooled.add(rows)
            vectors.append(self._finish(model, slot) if complete else None)
        return vectors

    def profile_prompt(self, model: LanguageModel, hidden_TD: Tensor) -> None:
        assert isinstance(model, PoolingModel), "the head belongs to pooling models"
        # A vector per token takes most.
        task = next((task for task in model.pooling.tasks if task in TOKEN_TASKS), model.pooling.tasks[0])
        pooled = AllTokens()
        pooled.add(hidden_TD)
        self._result(model, pooled, PoolingParams(task=task))

    def _finish(self, model: PoolingModel, slot: int) -> Tensor:
        params = self._states.params[slot]
        result = self._result(model, self._states.pooled[slot], params)
        if params.step_tag_id is not None:
            token_ids = torch.tensor(self._states.prompt_token_ids[slot], device=result.device)
            result = result[token_ids == params.step_tag_id]
        return result.contiguous()

    @staticmethod
    def _result(model: PoolingModel, pooled: Pooled, params: PoolingParams) -> Tensor:
        with torch.no_grad():
            return model.finish(pooled.result(), params).to(torch.float32)
