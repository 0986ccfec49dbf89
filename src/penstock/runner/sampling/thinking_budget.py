"""Thinking budget: forces the end-of-thinking marker after a number of thinking tokens.

Requests set `thinking_token_budget`; the front end adds the token ids of the start and end markers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.contract.sampling_params import LARGEST_BUDGET, THINKING_BUDGET
from penstock.runner.sampling.logits_processor import LogitsProcessor, ProcessorContext
from penstock.runner.staging import SlotParameter, StagedTensor
from penstock.step.logits_rows import LogitsRows
from penstock.structured.reasoning import after_last

_NOT_THINKING = -1
_NO_TOKEN = -1
# Start marker and end markers; the first end marker is the forced one.
_Markers = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
_IMPLIED_ENDS = "implied_end_token_ids"
_STARTS_IN_THINKING = "starts_in_thinking"
_FIELDS = {"budget", "start_token_ids", "end_token_ids"}


class ThinkingBudget(LogitsProcessor):
    """Argument keys: budget (tokens), start_token_ids, end_token_ids; optional: implied_end_token_ids (further end
    markers, a list of lists), starts_in_thinking (True if outputs think from the first token, without a start
    marker).

    The device keeps, per slot, the position at which thinking began. The host scans the prompt; each step then scans,
    on the device, the tokens that the previous step may have sampled and the row's drafts. The kept position ignores
    drafts.
    """

    name: ClassVar[str] = THINKING_BUDGET
    takes_drafts: ClassVar[bool] = True

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        device, num_slots = context.device, context.num_slots
        self._began_at = StagedTensor(device, num_slots, 1, torch.int64)
        self._budget = SlotParameter(device, num_slots, np.int64, 0)
        self._num_known = SlotParameter(device, num_slots, np.int64, 0)
        self._markers: dict[int, _Markers] = {}
        # Maximum number of drafts of a request in a step so far.
        self._most_drafts = 0

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        argument = (params.extra_args or {}).get(cls.name)
        if argument is None:
            return
        if not isinstance(argument, dict) or set(argument) - {_IMPLIED_ENDS, _STARTS_IN_THINKING} != _FIELDS:
            raise ValueError(
                f"extra_args[{cls.name!r}]={argument!r} is not valid. Allowed: a dictionary with {sorted(_FIELDS)}"
            )
        budget, implied_ends = argument["budget"], argument.get(_IMPLIED_ENDS, [])
        if not isinstance(implied_ends, (list, tuple)):
            raise ValueError(f"{_IMPLIED_ENDS}={implied_ends!r} is not valid. Allowed: a list of lists of token ids")
        markers = [argument["start_token_ids"], argument["end_token_ids"], *implied_ends]
        starts = argument.get(_STARTS_IN_THINKING, False)
        if not isinstance(starts, bool):
            raise ValueError(f"{_STARTS_IN_THINKING}={starts!r} is not valid. Allowed: True or False")
        if type(budget) is not int or not 0 <= budget <= LARGEST_BUDGET:
            raise ValueError(f"budget={budget!r} is not valid. Allowed: 0 to {LARGEST_BUDGET}")
        for marker in markers:
            if not marker or not isinstance(marker, (list, tuple)) or any(type(token) is not int for token in marker):
                raise ValueError(f"marker {marker!r} is not valid. Allowed: a non-empty list of token ids")

    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> bool:
        argument: dict[str, Any] | None = (params.extra_args or {}).get(self.name)
        if argument is None:
            return False
        start = tuple(argument["start_token_ids"])
        ends = tuple(map(tuple, [argument["end_token_ids"], *argument.get(_IMPLIED_ENDS, [])]))
        if max(max(marker) for marker in (start, *ends)) >= self.context.vocab_size:
            raise ValueError(f"The token ids {start} and {ends} exceed the vocabulary size {self.context.vocab_size}")
        known = [*prompt_token_ids, *output_token_ids]
        starts_at = len(prompt_token_ids) if argument.get(_STARTS_IN_THINKING, False) else _NOT_THINKING
        self._markers[slot] = (start, ends)
        self._began_at.discard(slot)
        self._began_at.stage(slot, 0, [_thinking_since(known, start, ends, starts_at)])
        self._budget.set(slot, argument["budget"])
        self._num_known.set(slot, len(known))
        return True

    def remove_request(self, slot: int) -> None:
        self._markers.pop(slot, None)

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        self._began_at.flush()
        self._most_drafts = max(self._most_drafts, rows.max_drafts)
        by_markers: dict[_Markers, list[int]] = {}
        for row, slot in enumerate(rows.slots_np.tolist()):
            by_markers.setdefault(self._markers[slot], []).append(row)
        for (start, ends), which in by_markers.items():
            which_np = np.array(which)
            index = self.context.device.upload(which_np)
            self._force(logits, index, rows.select(which_np, index), start, ends)
        return logits

    def _force(
        self, logits: Tensor, index: Tensor, rows: LogitsRows, start: Sequence[int], ends: Sequence[Sequence[int]]
    ) -> None:
        slots, positions = rows.slots, rows.positions
        num_known = self._num_known.tensor.index_select(0, slots)
        began_at = self._began_at.tensor.view(-1).index_select(0, slots)
        for back in range(2 * self._most_drafts, -1, -1):  # sampled by the previous step, then drafts
            last = positions - back
            tail = self._last_tokens(slots, last, max(map(len, (start, *ends))))
            is_new = last >= num_known
            began_at = torch.where(is_new & _ends_with(tail, start), last + 1, began_at)
            for end in ends:
                began_at = torch.where(is_new & _ends_with(tail, end), _NOT_THINKING, began_at)
        self._keep(rows, began_at)

        num_thought = positions + 1 - began_at
        is_over = (began_at != _NOT_THINKING) & (num_thought >= self._budget.tensor.index_select(0, slots))
        end = ends[0]
        next_token = torch.full_like(positions, end[0])
        for matched in range(1, len(end)):
            has_prefix = _ends_with(tail, end[:matched]) & (num_thought >= matched)
            next_token = torch.where(has_prefix, end[matched], next_token)
        part = logits.index_select(0, index)
        forced = torch.full_like(part, float("-inf")).scatter_(1, next_token.unsqueeze(-1), 0.0)
        logits.index_copy_(0, index, torch.where(is_over.unsqueeze(-1), forced, part))

    def _keep(self, rows: LogitsRows, began_at: Tensor) -> None:
        slots = rows.slots
        if rows.drafts is not None:
            known = self.context.device.upload(np.flatnonzero(rows.drafts.numbers_np == 0))
            slots, began_at = slots.index_select(0, known), began_at.index_select(0, known)
        self._began_at.tensor.view(-1).index_copy_(0, slots, began_at)

    def _last_tokens(self, slots: Tensor, positions: Tensor, count: int) -> Tensor:
        """Tokens up to each row's position, int64 [rows, count]; _NO_TOKEN before the first."""
        at = positions.unsqueeze(-1) + torch.arange(1 - count, 1, device=positions.device)
        tokens = self.context.token_ids[slots.unsqueeze(-1), at.clamp(min=0)].to(torch.int64)
        return tokens.masked_fill_(at < 0, _NO_TOKEN)


def _ends_with(tail: Tensor, marker: Sequence[int]) -> Tensor:
    """bool [rows]."""
    result = tail[:, -len(marker)] == marker[0]
    for offset in range(1, len(marker)):
        result = result & (tail[:, offset - len(marker)] == marker[offset])
    return result


def _thinking_since(
    token_ids: Sequence[int], start: Sequence[int], ends: Sequence[Sequence[int]], starts_at: int
) -> int:
    """Return the position at which thinking began; _NOT_THINKING if it did not, or has ended.

    It begins after the last start marker. starts_at: start without a marker, or _NOT_THINKING.
    """
    last_start, last_end = after_last(token_ids, start), max(after_last(token_ids, end) for end in ends)
    if last_start > last_end:
        return last_start
    return starts_at if last_end <= starts_at else _NOT_THINKING
