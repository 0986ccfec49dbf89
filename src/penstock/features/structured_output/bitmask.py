"""Worker side of structured output: the logits transform that applies the bitmask of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace
from torch import Tensor

from penstock.contract import NewRequestData, Parts, SchedulerOutput, StructuredOutputsParams, part_of
from penstock.device import Device
from penstock.features.structured_output.messages import BitmaskPart, num_words
from penstock.kernels.logits_shaping import allow_by_bits
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.runner.sampling.verification import Verification
from penstock.step.logits_rows import LogitsRows
from penstock.worker.feature import WorkerFeature, WorkerServices

_NOT_MASKED = -1


class Bitmask(LogitsTransform):
    """Applies a step's bitmask to the rows of requests with structured output.

    Other requests keep their logits, whatever the bitmask has for them. No state outlives a step.
    """

    def __init__(self, device: Device, num_slots: int, vocab_size: int) -> None:
        self._device = device
        self._num_words = num_words(vocab_size)
        self._is_constrained = np.zeros(num_slots, dtype=bool)
        # The current step's bitmask, int32 [rows, words], and the first row of each slot in it.
        self._words: np.ndarray | None = None
        self._first_row = np.full(num_slots, _NOT_MASKED)

    def add_request(self, slot: int, request: NewRequestData) -> None:
        self._is_constrained[slot] = request.sampling_params.structured_outputs is not None

    def remove_request(self, slot: int) -> None:
        self._is_constrained[slot] = False

    def takes_drafts(self, slot: int, verification: Verification) -> bool:
        return not (verification.keeps_what_cannot_be and self._is_constrained[slot])

    def begin_step(self, parts: Parts | None, slot_of: Mapping[str, int]) -> None:
        part = part_of(parts, BitmaskPart)
        if part is None:
            self._words = None
            return
        self._words = np.frombuffer(part.bitmask, dtype="<i4").reshape(-1, self._num_words)
        self._first_row.fill(_NOT_MASKED)
        row = 0
        for req_id, num_rows in zip(part.req_ids, part.rows, strict=True):
            if req_id in slot_of:
                self._first_row[slot_of[req_id]] = row
            row += num_rows

    def dummy_request(self, request: NewRequestData) -> NewRequestData:
        constraint = StructuredOutputsParams(json_object=True)
        return replace(request, sampling_params=replace(request.sampling_params, structured_outputs=constraint))

    def dummy_part(self, message: SchedulerOutput) -> BitmaskPart:
        """Return a bitmask that allows all tokens."""
        req_ids = message.awaiting_req_ids
        rows = [1 + len(message.scheduled_spec_decode_tokens.get(req_id, ())) for req_id in req_ids]
        return BitmaskPart(req_ids=req_ids, bitmask=b"\xff" * (4 * self._num_words * sum(rows)), num_rows=rows)

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return bool(self._is_constrained[slots_np].any())

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        if self._words is None:
            return logits
        slots = rows.slots_np
        first_row = np.where(self._is_constrained[slots], self._first_row[slots], _NOT_MASKED)
        which = np.flatnonzero(first_row != _NOT_MASKED)
        if not len(which):
            return logits
        numbers = 0 if rows.drafts is None else rows.drafts.numbers_np[which]
        words = self._device.upload(self._words[first_row[which] + numbers])
        index = None if len(which) == len(slots) else self._device.upload(which)
        return allow_by_bits(logits, index, words)


class BitmaskWorker(WorkerFeature):
    """Worker side of structured output."""

    def __init__(self, services: WorkerServices) -> None:
        self._transforms = [Bitmask(services.device, services.num_slots, services.config.model.vocab_size)]

    def logits_transforms(self) -> Sequence[LogitsTransform]:
        return self._transforms
