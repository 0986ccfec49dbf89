"""Temperature, applied before truncation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.device import Device
from penstock.runner.logits_rows import LogitsRows
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.staging import SlotParameter


class Temperature(LogitsTransform):
    """Divides by the temperature. Greedy requests (temperature 0) keep their logits: only their order matters."""

    def __init__(self, device: Device, num_slots: int) -> None:
        self._divisor = SlotParameter(device, num_slots, np.float32, 1.0)

    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._divisor.set(slot, 1.0 if params.is_greedy else params.temperature)

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return self._divisor.any_set(slots_np)

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        return logits.div_(self._divisor.tensor.index_select(0, rows.slots).unsqueeze(-1))
