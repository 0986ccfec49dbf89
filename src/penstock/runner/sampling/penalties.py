"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.contract import NewRequestData
from penstock.device import Device
from penstock.kernels.bound_step import StepOutcome
from penstock.kernels.logits_shaping import IN_PROMPT, count_tokens, penalise
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.staging import SlotParameter
from penstock.step.logits_rows import LogitsRows


class Penalties(LogitsTransform):
    """Keeps a table of token occurrences on the device, int32 [slots, vocabulary], allocated at first use.

    A row is initialised for each request with a penalty and updated on the device after each step, without waiting.
    token_ids_SL: the runner's token table.
    """

    def __init__(self, device: Device, num_slots: int, vocab_size: int, token_ids_SL: Tensor) -> None:
        self._device = device
        self._shape = (num_slots, vocab_size)
        self._token_ids_SL = token_ids_SL
        self._table_SV: Tensor | None = None
        self._has_penalty = np.zeros(num_slots, dtype=np.bool_)
        self._repetition = SlotParameter(device, num_slots, np.float32, 1.0)
        self._frequency = SlotParameter(device, num_slots, np.float32, 0.0)
        self._presence = SlotParameter(device, num_slots, np.float32, 0.0)
        # Token ids and occurrences of requests whose row is not initialised yet.
        self._unwritten: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._rows_for: np.ndarray | None = None
        self._rows: Tensor | None = None
        self._penalised_np: np.ndarray

    def add_request(self, slot: int, request: NewRequestData) -> None:
        params = request.sampling_params
        self._repetition.set(slot, params.repetition_penalty)
        self._frequency.set(slot, params.frequency_penalty)
        self._presence.set(slot, params.presence_penalty)
        has_penalty = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        self._has_penalty[slot] = has_penalty
        self._rows_for = None
        self._unwritten.pop(slot, None)
        if has_penalty:
            prompt = request.prompt_token_ids if request.has_prompt_ids else ()
            self._unwritten[slot] = _occurrences(prompt, request.output_token_ids, self._shape[1])

    def remove_request(self, slot: int) -> None:
        self._unwritten.pop(slot, None)

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return bool(self._has_penalty[slots_np].any())

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        table = self._written_table()
        which, slots = self._penalised_rows(rows)
        lines = slots
        if rows.drafts is not None:
            table = self._with_drafts(table, rows if which is None else rows.select(self._penalised_np, which))
            lines = torch.arange(len(slots), device=slots.device)
        return penalise(
            logits, which, table, lines, slots, self._repetition.tensor, self._frequency.tensor, self._presence.tensor
        )

    def advance(self, slots: Tensor, slots_np: np.ndarray, outcome: StepOutcome) -> None:
        # Requests without a penalty are counted too: their row is initialised before it is read.
        if self._table_SV is not None and self.is_needed(slots_np):
            count_tokens(self._table_SV, slots, outcome.sampled_token_ids, outcome.num_sampled)

    def _with_drafts(self, table_SV: Tensor, rows: LogitsRows) -> Tensor:
        """Occurrences before each of these rows, [rows, vocabulary], with its drafts counted as output."""
        assert rows.drafts is not None, "called for steps with drafts"
        table_RV = table_SV.index_select(0, rows.slots)
        firsts = torch.arange(len(rows.slots), device=table_RV.device) * self._shape[1]
        for back in range(rows.max_drafts):
            tokens = self._token_ids_SL[rows.slots, (rows.positions - back).clamp(min=0)]
            table_RV.view(-1).index_add_(0, firsts + tokens, (rows.drafts.numbers > back).to(torch.int32))
        return table_RV

    def _written_table(self) -> Tensor:
        if self._table_SV is None:
            num_bytes = self._shape[0] * self._shape[1] * torch.int32.itemsize
            self._table_SV = self._device.allocate(num_bytes).view(torch.int32).view(self._shape)
        for slot, (token_ids, occurrences) in self._unwritten.items():
            row = self._table_SV[slot].zero_()
            row.index_copy_(0, self._device.upload(token_ids), self._device.upload(occurrences))
        self._unwritten.clear()
        return self._table_SV

    def _penalised_rows(self, rows: LogitsRows) -> tuple[Tensor | None, Tensor]:
        """Rows with a penalty, None for all, and their slots."""
        if self._rows_for is not rows.slots_np:
            self._penalised_np = np.flatnonzero(self._has_penalty[rows.slots_np])
            are_all = len(self._penalised_np) == len(rows.slots_np)
            self._rows = None if are_all else self._device.upload(self._penalised_np)
            self._rows_for = rows.slots_np
        which = self._rows
        return which, rows.slots if which is None else rows.slots.index_select(0, which)


def _occurrences(
    prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that have occurred, int64, and their entries, int32: IN_PROMPT plus the count in the output."""
    counts = np.bincount(np.asarray(output_token_ids, dtype=np.int64), minlength=vocab_size).astype(np.int32)
    counts[np.asarray(prompt_token_ids, dtype=np.int64)] |= IN_PROMPT
    token_ids = np.flatnonzero(counts)
    return token_ids, counts[token_ids]
