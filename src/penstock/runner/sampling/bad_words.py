"""Bad words: masks the last token of a sequence where the output ends with the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.device import Device
from penstock.kernels.logits_shaping import ends_with_prefix, forbid_tokens
from penstock.runner.logits_rows import LogitsRows
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.sampling.slot_lists import SlotLists, token_id_array
from penstock.runner.staging import SlotParameter

_NO_TOKEN = -1


class BadWords(LogitsTransform):
    """token_ids_SL: the runner's token table. A word counts only if it lies in the output entirely, not in the prompt.

    Prefixes are padded to the longest of any request so far, because a step compares them all at once.
    """

    def __init__(self, device: Device, num_slots: int, vocab_size: int, token_ids_SL: Tensor) -> None:
        self._vocab_size = vocab_size
        self._token_ids_SL = token_ids_SL
        self._prompt_len = SlotParameter(device, num_slots, np.int64, 0)
        self._lists = SlotLists(device, num_slots)
        self._words: dict[int, list[np.ndarray]] = {}
        self._width = 0

    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        words = [token_id_array("bad_words_token_ids", word, self._vocab_size) for word in params.bad_words_token_ids]
        # A word longer than the context length cannot occur.
        words = [word for word in words if len(word) < self._token_ids_SL.shape[1]]
        self._prompt_len.set(slot, len(prompt_token_ids))
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

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return self._lists.any_set(slots_np)

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
