"""Minimal length: tokens that would end the output are impossible before it has as many tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.device import Device
from penstock.kernels.logits_shaping import forbid_tokens
from penstock.runner.sampling.slot_lists import SlotLists, token_id_array
from penstock.runner.sampling.stage import LogitsRows, SamplingStage
from penstock.runner.staging import SlotParameter


class MinTokens(SamplingStage):
    def __init__(self, device: Device, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # Positions of the last token, from the prompt's first one, at which the output is long enough.
        self._free_from = SlotParameter(device, num_slots, np.int64, 0)
        self._lists = SlotLists(device, num_slots)

    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        is_long_enough = len(output_token_ids) >= params.min_tokens
        stops = () if is_long_enough else sorted({*params.all_stop_token_ids, *params.stop_token_ids})
        self._lists.set(slot, token_id_array("stop_token_ids", stops, self._vocab_size))
        self._free_from.set(slot, len(prompt_token_ids) + params.min_tokens - 1)

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return self._lists.any_set(slots_np)

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        lists = self._lists.pack(rows)
        is_short = rows.positions < self._free_from.tensor.index_select(0, rows.slots)
        return forbid_tokens(logits, lists.row_of, lists.columns[0], is_short.index_select(0, lists.row_of))
