"""Step input of learned position tables that have rows before that of a text's first token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.layers.embedding import POSITION_IDS
from penstock.runner.slot_owner import SlotOwner
from penstock.step.frame import Frame
from penstock.step.inputs import StepInput


class PositionIds(SlotOwner):
    """Owner of the row of every token. first_position: row of a text's first token."""

    step_inputs: Sequence[StepInput] = (StepInput(POSITION_IDS, torch.int32),)

    def __init__(self, first_position: int) -> None:
        self._first_position = first_position

    def has_work(self, frame: Frame) -> bool:
        return True

    def fill(self, frame: Frame) -> None:
        num_tokens = frame.batch.layout.plan.num_tokens
        rows_T = frame.inputs.named[POSITION_IDS][:num_tokens]
        torch.add(frame.batch.positions[:num_tokens], self._first_position, out=rows_T)
