"""Minimum length: masks tokens that would end the output before `min_tokens`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.contract import NewRequestData
from penstock.device import Device
from penstock.device.base import PendingCopy
from penstock.kernels.logits_shaping import forbid_tokens
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.sampling.token_lists import SlotLists, token_id_array
from penstock.runner.staging import SlotParameter
from penstock.step.logits_rows import LogitsRows


@dataclass(frozen=True, slots=True)
class _Report:
    """Too-short rows of a step, in copy to the host. tenants: request counts of its slots at that time."""

    slots: np.ndarray
    tenants: np.ndarray
    is_short: PendingCopy


class MinTokens(LogitsTransform):
    """Goes idle once all requests have reached their minimum, which the device reports some steps later."""

    def __init__(self, device: Device, num_slots: int, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        # Position of the last token from which on the output is long enough.
        self._free_from = SlotParameter(device, num_slots, np.int64, 0)
        self._lists = SlotLists(device, num_slots)
        # Number of requests that each slot has had.
        self._tenants = np.zeros(num_slots, dtype=np.int64)
        self._reports: list[_Report] = []

    def add_request(self, slot: int, request: NewRequestData) -> None:
        params, num_prompt_tokens = request.sampling_params, len(request.prompt_token_ids)
        is_long_enough = len(request.prefill_token_ids) >= num_prompt_tokens + params.min_tokens
        stops = () if is_long_enough else sorted({*params.all_stop_token_ids, *params.stop_token_ids})
        self._tenants[slot] += 1
        self._lists.set(slot, token_id_array("stop_token_ids", stops, self._vocab_size))
        self._free_from.set(slot, num_prompt_tokens + params.min_tokens - 1)

    def is_needed(self, slots_np: np.ndarray) -> bool:
        self._release()
        return self._lists.any_set(slots_np)

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        lists = self._lists.pack(rows)
        free_from = self._free_from.tensor.index_select(0, rows.slots)
        is_short = rows.positions < free_from
        # Drafts may be rejected: only known tokens count as reaching the minimum.
        is_known_short = is_short if rows.drafts is None else rows.known_positions < free_from
        report = self._device.download([is_known_short])
        self._reports.append(_Report(rows.slots_np, self._tenants[rows.slots_np], report))
        return forbid_tokens(logits, lists.row_of, lists.columns[0], is_short.index_select(0, lists.row_of))

    def _release(self) -> None:
        """Drop the lists of requests that are known to have reached their minimum."""
        while self._reports and self._reports[0].is_short.is_done():
            report = self._reports.pop(0)
            has_passed = ~report.is_short.tensors[0].numpy() & (self._tenants[report.slots] == report.tenants)
            for slot in report.slots[has_passed & self._lists.has_list(report.slots)]:
                self._lists.set(int(slot))
