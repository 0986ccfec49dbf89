"""Logits transforms with lists of token ids per request: allowed tokens, logit bias and bad words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.contract import NewRequestData
from penstock.device import Device
from penstock.errors import InvalidParameter
from penstock.kernels.logits_shaping import add_to_tokens, ends_with_prefix, forbid_tokens, keep_tokens
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.staging import SlotParameter
from penstock.step.logits_rows import LogitsRows


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
        return bool(self._columns) and bool(self.has_list(slots_np).any())

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


class _TokenLists(LogitsTransform):
    """Base of transforms with a list of token ids per slot."""

    def __init__(self, device: Device, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lists = SlotLists(device, num_slots)

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return self._lists.any_set(slots_np)


class AllowedTokens(_TokenLists):
    def add_request(self, slot: int, request: NewRequestData) -> None:
        allowed = request.sampling_params.allowed_token_ids or ()
        self._lists.set(slot, token_id_array("allowed_token_ids", allowed, self._vocab_size))

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        lists = self._lists.pack(rows)
        return keep_tokens(logits, lists.rows, lists.row_of, lists.columns[0])


class LogitBias(_TokenLists):
    def add_request(self, slot: int, request: NewRequestData) -> None:
        bias = request.sampling_params.logit_bias or {}
        token_ids = token_id_array("logit_bias", list(bias), self._vocab_size)
        self._lists.set(slot, token_ids, np.array(list(bias.values()), dtype=np.float32))

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        lists = self._lists.pack(rows)
        return add_to_tokens(logits, lists.row_of, *lists.columns)


_NO_TOKEN = -1


class BadWords(_TokenLists):
    """token_ids_SL: the runner's token table. A word counts only if it lies in the output entirely, not in the prompt.

    Prefixes are padded to the longest of any request so far, because a step compares them all at once.
    """

    def __init__(self, device: Device, num_slots: int, vocab_size: int, token_ids_SL: Tensor) -> None:
        super().__init__(device, num_slots, vocab_size)
        self._token_ids_SL = token_ids_SL
        self._prompt_len = SlotParameter(device, num_slots, np.int64, 0)
        self._words: dict[int, list[np.ndarray]] = {}
        self._width = 0

    def add_request(self, slot: int, request: NewRequestData) -> None:
        given = request.sampling_params.bad_words_token_ids
        words = [token_id_array("bad_words_token_ids", word, self._vocab_size) for word in given]
        # A word longer than the context length cannot occur.
        words = [word for word in words if len(word) < self._token_ids_SL.shape[1]]
        self._prompt_len.set(slot, len(request.prompt_token_ids))
        self.remove_request(slot)
        if not words:
            return
        self._words[slot] = words
        longest = max(len(word) for word in words) - 1
        if longest > self._width:
            self._width = longest
            for other in self._words:
                self._set(other)
        else:
            self._set(slot)

    def remove_request(self, slot: int) -> None:
        if self._words.pop(slot, None) is not None:
            self._lists.set(slot)

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        lists = self._lists.pack(rows)
        last_token, prefix = lists.columns
        slots = rows.slots.index_select(0, lists.row_of)
        is_next = ends_with_prefix(
            self._token_ids_SL,
            slots,
            rows.positions.index_select(0, lists.row_of) + 1,
            self._prompt_len.tensor.index_select(0, slots),
            prefix,
        )
        return forbid_tokens(logits, lists.row_of, last_token, is_next)

    def _set(self, slot: int) -> None:
        words = self._words[slot]
        prefixes = np.full((len(words), self._width), _NO_TOKEN, dtype=np.int64)
        for prefix, word in zip(prefixes, words, strict=True):
            prefix[self._width - (len(word) - 1) :] = word[:-1]
        self._lists.set(slot, np.array([word[-1] for word in words], dtype=np.int64), prefixes)
