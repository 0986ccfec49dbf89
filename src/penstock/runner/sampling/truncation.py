"""Temperature and truncation of the distribution.

min-p: Nguyen et al., "Turning Up the Heat", 2024. top-p (nucleus sampling): Holtzman et al., "The Curious Case of
Neural Text Degeneration", 2020.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from penstock.contract import NewRequestData
from penstock.device import Device
from penstock.kernels.sampling import apply_temperature, mask_min_p, mask_top_k_top_p
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.staging import SlotParameter
from penstock.step.logits_rows import LogitsRows


class Temperature(LogitsTransform):
    """Divides by the temperature. Greedy requests (temperature 0) keep their logits: only their order matters."""

    def __init__(self, device: Device, num_slots: int) -> None:
        self._divisor = SlotParameter(device, num_slots, np.float32, 1.0)

    def add_request(self, slot: int, request: NewRequestData) -> None:
        params = request.sampling_params
        self._divisor.set(slot, 1.0 if params.is_greedy else params.temperature)

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return self._divisor.any_set(slots_np)

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        return apply_temperature(logits, self._divisor.tensor, rows.slots)


class MinP(LogitsTransform):
    def __init__(self, device: Device, num_slots: int) -> None:
        self._min_p = SlotParameter(device, num_slots, np.float32, 0.0)

    def add_request(self, slot: int, request: NewRequestData) -> None:
        params = request.sampling_params
        self._min_p.set(slot, 0.0 if params.is_greedy else params.min_p)

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return self._min_p.any_set(slots_np)

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        return mask_min_p(logits, self._min_p.tensor, rows.slots)


class TopKTopP(LogitsTransform):
    """Top-k and top-p truncation, in one transform, since both need the same sort or search."""

    def __init__(self, device: Device, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._top_k = SlotParameter(device, num_slots, np.int64, vocab_size)
        self._top_p = SlotParameter(device, num_slots, np.float32, 1.0)

    def add_request(self, slot: int, request: NewRequestData) -> None:
        params = request.sampling_params
        keeps_all = params.is_greedy or not 0 < params.top_k < self._vocab_size
        self._top_k.set(slot, self._vocab_size if keeps_all else params.top_k)
        self._top_p.set(slot, 1.0 if params.is_greedy else params.top_p)

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return self._top_k.any_set(slots_np) or self._top_p.any_set(slots_np)

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        return mask_top_k_top_p(logits, self._top_k.tensor, self._top_p.tensor, rows.slots)
