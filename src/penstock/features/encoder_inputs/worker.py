"""Step inputs of encoders: rows of the position table, and token types."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.contract import NewRequestData
from penstock.device import Device
from penstock.models.bert import TOKEN_TYPE_IDS
from penstock.runner.position_ids import PositionIds
from penstock.step.frame import Frame
from penstock.step.inputs import StepInput
from penstock.worker.feature import WorkerServices


class EncoderInputs(PositionIds):
    """Position ids, and the number of the text in a pair, of every token."""

    step_inputs = (*PositionIds.step_inputs, StepInput(TOKEN_TYPE_IDS, torch.int32))

    def __init__(self, device: Device, num_slots: int, first_position: int, num_token_types: int) -> None:
        super().__init__(first_position)
        self._device = device
        self._has_types = num_token_types > 1
        # Position of the second text of a pair, by slot; past all positions for single texts.
        self._second_start = np.full(num_slots, np.iinfo(np.int32).max, dtype=np.int64)

    def add(self, slot: int, request: NewRequestData) -> None:
        params = request.pooling_params
        start = None if params is None else params.second_text_start
        self._second_start[slot] = np.iinfo(np.int32).max if start is None or not self._has_types else start

    def fill(self, frame: Frame) -> None:
        super().fill(frame)
        layout = frame.batch.layout
        num_tokens = layout.plan.num_tokens
        starts = self._second_start[layout.slots_np]
        types = frame.inputs.named[TOKEN_TYPE_IDS][:num_tokens]
        if not self._has_types or (starts == np.iinfo(np.int32).max).all():
            types.zero_()
            return
        starts_T = self._device.upload(np.repeat(starts, layout.counts_np))
        types.copy_(frame.batch.positions[:num_tokens] >= starts_T)


def encoder_inputs(services: WorkerServices) -> EncoderInputs:
    """Step inputs of an encoder."""
    backbone: Any = services.model.backbone  # type: ignore[attr-defined]
    return EncoderInputs(services.device, services.num_slots, backbone.first_position, backbone.num_token_types)
