"""min-p: masks tokens far less likely than the most likely one (Nguyen et al., "Turning Up the Heat", 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.device import Device
from penstock.kernels.sampling import mask_min_p
from penstock.runner.logits_rows import LogitsRows
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.staging import SlotParameter


class MinP(LogitsTransform):
    def __init__(self, device: Device, num_slots: int) -> None:
        self._min_p = SlotParameter(device, num_slots, np.float32, 0.0)

    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._min_p.set(slot, 0.0 if params.is_greedy else params.min_p)

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return self._min_p.any_set(slots_np)

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        return mask_min_p(logits, self._min_p.tensor.index_select(0, rows.slots))
