"""Ragged lists per slot, such as allowed token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.device import Device
from penstock.errors import InvalidParameter
from penstock.runner.logits_rows import LogitsRows


@dataclass(frozen=True, slots=True)
class PackedLists:
    """Concatenated lists of a step's rows: E entries.

    rows: int64, rows of the step that have a list. row_of: int64 [E], row of each entry. columns: each [E, …].
    """

    rows: Tensor
    row_of: Tensor
    columns: tuple[Tensor, ...]


class SlotLists:
    """Host arrays per slot; the lists of a step's rows are uploaded, and kept while the rows stay the same."""

    def __init__(self, device: Device, num_slots: int) -> None:
        self._device = device
        self._has_list = np.zeros(num_slots, dtype=np.bool_)
        self._columns: dict[int, tuple[np.ndarray, ...]] = {}
        self._packed: PackedLists | None = None
        self._packed_for: np.ndarray | None = None

    def set(self, slot: int, *columns: np.ndarray) -> None:
        """Replace the slot's list; its columns must be of equal length. No columns, or empty ones, clear it."""
        has_list = bool(columns) and len(columns[0]) > 0
        if has_list:
            self._columns[slot] = columns
        else:
            self._columns.pop(slot, None)
        self._has_list[slot] = has_list
        self._packed_for = None

    def any_set(self, slots_np: np.ndarray) -> bool:
        return bool(self.has_list(slots_np).any())

    def has_list(self, slots_np: np.ndarray) -> np.ndarray:
        """Whether each of these slots has a list, bool [slots]."""
        found: np.ndarray = self._has_list[slots_np]
        return found

    def pack(self, rows: LogitsRows) -> PackedLists:
        """Return the lists of these rows, at least one of which must have one."""
        if self._packed is None or self._packed_for is not rows.slots_np:
            self._packed = self._upload(rows.slots_np)
            self._packed_for = rows.slots_np
        return self._packed

    def _upload(self, slots_np: np.ndarray) -> PackedLists:
        listed = np.flatnonzero(self._has_list[slots_np])
        lists = [self._columns[slot] for slot in slots_np[listed].tolist()]
        row_of = np.repeat(listed, [len(columns[0]) for columns in lists])
        columns = tuple(np.concatenate(parts) for parts in zip(*lists, strict=True))
        return PackedLists(
            rows=self._device.upload(listed),
            row_of=self._device.upload(row_of),
            columns=tuple(self._device.upload(column) for column in columns),
        )


def token_id_array(name: str, token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Convert token ids to int64; raises InvalidParameter, with `name`, for one outside the vocabulary."""
    array = np.asarray(token_ids, dtype=np.int64)
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        wrong = int(array.min()) if array.min() < 0 else int(array.max())
        raise InvalidParameter(
            f"{name} has {wrong}, but the model's vocabulary has {vocab_size} tokens. Allowed: 0 to {vocab_size - 1}."
        )
    return array
