"""Logit bias: added to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.device import Device
from penstock.kernels.logits_shaping import add_to_tokens
from penstock.runner.logits_rows import LogitsRows
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.sampling.slot_lists import SlotLists, token_id_array


class LogitBias(LogitsTransform):
    def __init__(self, device: Device, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lists = SlotLists(device, num_slots)

    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        bias = params.logit_bias or {}
        token_ids = token_id_array("logit_bias", list(bias), self._vocab_size)
        self._lists.set(slot, token_ids, np.array(list(bias.values()), dtype=np.float32))

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return self._lists.any_set(slots_np)

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        lists = self._lists.pack(rows)
        return add_to_tokens(logits, lists.row_of, *lists.columns)
