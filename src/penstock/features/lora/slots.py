"""Adapters of requests by slot, and the step inputs by which layers choose them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from penstock.contract import NewRequestData, part_of
from penstock.device import Device
from penstock.features.lora.request import AdapterPart
from penstock.features.lora.tables import AdapterTables, PackedModelAdapter
from penstock.layers.adapters import ADAPTER_SLOTS, ADAPTER_TOKENS, HEAD_SLOTS
from penstock.runner.slot_owner import SlotOwner
from penstock.step.frame import Frame
from penstock.step.inputs import StepInput

_NONE = -1


class Adapters(Protocol):
    """Adapters of a rank, whose slots the owners take and release."""

    tables: AdapterTables

    def acquire(self, part: AdapterPart) -> tuple[int, PackedModelAdapter]:
        """Return the slot of a request's adapter, and the adapter; `release` follows."""

    def release(self, slot: int) -> None:
        """Note that a request does not use the adapter of this slot any more."""


class AdapterSlots(SlotOwner):
    """Adapter slot of each request."""

    step_inputs = (StepInput(ADAPTER_SLOTS, torch.int32, padding=_NONE),)

    def __init__(self, device: Device, num_slots: int, adapters: Adapters) -> None:
        self.device, self._adapters, self.tables = device, adapters, adapters.tables
        self.adapter_slots = np.full(num_slots, _NONE, dtype=np.int32)
        # Slots of adapters that change the LM head, and the embedding.
        self.head_slots, self.embedding_slots = (np.full(num_slots, _NONE, dtype=np.int32) for _ in range(2))

    def add(self, slot: int, request: NewRequestData) -> None:
        part = part_of(request.parts, AdapterPart)
        if part is None:
            return
        adapter_slot, adapter = self._adapters.acquire(part)
        self.adapter_slots[slot] = adapter_slot
        self.head_slots[slot] = adapter_slot if adapter.has_head else _NONE
        self.embedding_slots[slot] = adapter_slot if adapter.has_embedding else _NONE

    def remove(self, slot: int) -> None:
        adapter_slot = int(self.adapter_slots[slot])
        if adapter_slot != _NONE:
            self._adapters.release(adapter_slot)
            self.adapter_slots[slot] = self.head_slots[slot] = self.embedding_slots[slot] = _NONE

    def has_work(self, frame: Frame) -> bool:
        return bool((self.adapter_slots[frame.batch.layout.slots_np] != _NONE).any())

    def fill(self, frame: Frame) -> None:
        fill_slots(frame, self.device, ADAPTER_SLOTS, self.adapter_slots)


class HeadSlots(SlotOwner):
    """Adapter slot of each request whose adapter changes the LM head."""

    step_inputs = (StepInput(HEAD_SLOTS, torch.int32, padding=_NONE),)

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots

    def has_work(self, frame: Frame) -> bool:
        return bool((self._slots.head_slots[frame.batch.layout.slots_np] != _NONE).any())

    def fill(self, frame: Frame) -> None:
        fill_slots(frame, self._slots.device, HEAD_SLOTS, self._slots.head_slots)


class AdapterTokens(SlotOwner):
    """Row of each token in the table of the embedding's adapters."""

    step_inputs = (StepInput(ADAPTER_TOKENS, torch.int32),)

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots

    def has_work(self, frame: Frame) -> bool:
        return bool((self._slots.embedding_slots[frame.batch.layout.slots_np] != _NONE).any())

    def fill(self, frame: Frame) -> None:
        num_tokens = frame.batch.layout.plan.num_tokens
        rows_T = frame.inputs.named[ADAPTER_TOKENS][:num_tokens]
        # Requests without such an adapter look up rows of slot 0, which the products ignore.
        first_rows = self._slots.embedding_slots.clip(min=0) * self._slots.tables.vocab_size
        rows_T.copy_(self._slots.device.upload(_by_token(frame, first_rows.astype(np.int32))))
        rows_T.add_(frame.batch.input_ids[:num_tokens])


def adapter_owners(device: Device, num_slots: int, adapters: Adapters) -> Sequence[SlotOwner]:
    """Owners of the adapters of a runner's requests."""
    slots = AdapterSlots(device, num_slots, adapters)
    return slots, HeadSlots(slots), AdapterTokens(slots)


def fill_slots(frame: Frame, device: Device, name: str, slots_np: np.ndarray) -> None:
    """Write the adapter slots of a frame's tokens; a repeated frame has them already."""
    if not frame.is_repeated:
        rows = _by_token(frame, slots_np)
        device.write(frame.inputs.named[name][: len(rows)], rows)


def _by_token(frame: Frame, slots_np: np.ndarray) -> np.ndarray:
    layout = frame.batch.layout
    return np.repeat(slots_np[layout.slots_np], layout.counts_np)
