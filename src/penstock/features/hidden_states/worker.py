"""Worker side of hidden states: rows of the forward pass that are copied to the host with the step's tokens.

Suffixes: T tokens of the step, N rows of a request, L layers, D hidden size.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.contract import NewRequestData, part_of
from penstock.device.base import PendingCopy, wait_until
from penstock.errors import UnsupportedFeature
from penstock.features.hidden_states.messages import FINAL, HiddenStatesPart, StepHiddenStates
from penstock.runner.slot_owner import SlotOwner
from penstock.step.frame import Frame
from penstock.worker.feature import WorkerServices


class _Asked(NamedTuple):
    """Layers of a slot's request: from 0 on, or `FINAL`. has_all: of all tokens, not of the last one only."""

    has_all: bool
    layers: tuple[int, ...]


class PendingHiddenStates:
    """Hidden states of a step in copy to the host. step_id: named in errors. req_ids: one per tensor [N, L, D]."""

    def __init__(self, step_id: int, req_ids: list[str], copy: PendingCopy) -> None:
        self._step_id = step_id
        self._req_ids = req_ids
        self._copy = copy

    def get(self, timeout_s: float) -> StepHiddenStates:
        """See `PendingPart`."""
        wait_until(
            self._copy.is_done, timeout_s, lambda: f"The runner waited for the hidden states of step {self._step_id}."
        )
        states_NLD = self._copy.tensors
        return StepHiddenStates(
            dtype=str(states_NLD[0].dtype).removeprefix("torch."),
            data={
                req_id: one_NLD.view(torch.uint8).numpy().tobytes()
                for req_id, one_NLD in zip(self._req_ids, states_NLD, strict=True)
            },
            num_rows=dict(zip(self._req_ids, map(len, states_NLD), strict=True)),
        )


class HiddenStatesOwner(SlotOwner):
    """Requests for hidden states by slot."""

    def __init__(self, services: WorkerServices) -> None:
        self._device = services.device
        self._config = services.config.model
        self._model_name = type(services.model).__name__
        self._notes_layers: bool = getattr(services.model, "notes_layers", False)
        self._asked: dict[int, _Asked] = {}

    def add(self, slot: int, request: NewRequestData) -> None:
        part = part_of(request.parts, HiddenStatesPart)
        if part is None:
            return
        num_layers = self._config.num_layers
        layers = tuple(FINAL if layer == num_layers else layer for layer in part.numbers(num_layers))
        if not self._notes_layers and set(layers) != {FINAL}:
            raise UnsupportedFeature(
                f"hidden_states_layers={list(part.layers)}: {self._model_name} gives those after its final norm only. "
                "Leave hidden_states_layers out."
            )
        self._asked[slot] = _Asked(part.has_all, layers)

    def remove(self, slot: int) -> None:
        self._asked.pop(slot, None)

    def reads_hidden(self, frame: Frame) -> Collection[int] | None:
        if not self._asked:
            return None
        asked = [self._asked[slot].layers for slot in frame.batch.layout.slots_np.tolist() if slot in self._asked]
        return {layer for layers in asked for layer in layers} - {FINAL} if asked else None

    def part_of_hidden(self, frame: Frame) -> PendingHiddenStates | None:
        layout, req_ids, found = frame.batch.layout, [], []
        starts = layout.query_start_loc_np.tolist()
        for index, slot in enumerate(layout.slots_np.tolist()):
            asked = self._asked.get(slot)
            if asked is not None:
                num_drafts = 0 if layout.num_drafts_np is None else int(layout.num_drafts_np[index])
                stop = starts[index + 1]
                start = starts[index] if asked.has_all else stop - 1 - num_drafts
                req_ids.append(layout.req_ids[index])
                found.append(torch.stack([state_TD[start:stop] for state_TD in self._states(frame, asked.layers)], 1))
        # All of them may have been removed since.
        return PendingHiddenStates(frame.step_id, req_ids, self._device.download(found)) if found else None

    @staticmethod
    def _states(frame: Frame, layers: tuple[int, ...]) -> list[Tensor]:
        assert frame.all_hidden is not None, "a frame with such a request wants all rows"
        return [frame.all_hidden if layer == FINAL else frame.aux[layer] for layer in layers]
