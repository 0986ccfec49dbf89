"""Per-slot state of requests that every model needs.

The device's copy is authoritative: it is read and advanced there. The host keeps only what is constant during a
request's life, and upper bounds, which are named so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.contract import CachedRequestData, NewRequestData
from penstock.device import Device
from penstock.kernels.bound_step import StepOutcome
from penstock.runner.slot_owner import SlotOwner
from penstock.runner.staging import SlotParameter, StagedTensor, flush_together
from penstock.step.batch import InputBatch
from penstock.step.frame import Frame


class RequestStates(SlotOwner):
    """Slots 0..max_num_reqs-1 for requests, and one more for padding.

    all_token_ids: int32 [slots, max_model_len + 1], prompt and generated tokens.
    total_len, num_computed_tokens: int64 [slots, 1]; a decoding request has computed total_len - 1 after each step.
    draft_token_ids: int32 [slots, max_drafts], draft tokens that the next step verifies, from the scheduler's
        message or from a speculator that drafts on the device.
    prefill_len: tokens known when the request was added.
    """

    def __init__(self, device: Device, max_num_reqs: int, max_model_len: int, max_drafts: int = 0) -> None:
        self.max_num_reqs = max_num_reqs
        self.padding_slot = max_num_reqs
        num_slots = max_num_reqs + 1
        # One cell more than the context length: a full row is still written to, with the value that it already holds.
        self.all_token_ids = StagedTensor(device, num_slots, max_model_len + 1, torch.int32)
        self.total_len = StagedTensor(device, num_slots, 1, torch.int64)
        self.num_computed_tokens = StagedTensor(device, num_slots, 1, torch.int64)
        self.draft_token_ids = StagedTensor(device, num_slots, max_drafts, torch.int32)
        self._staged = [self.all_token_ids, self.total_len, self.num_computed_tokens, self.draft_token_ids]
        self.max_drafts = max_drafts
        self.prefill_len = SlotParameter(device, num_slots, np.int64, 0)
        self._computed_upper_bound = np.zeros(num_slots, dtype=np.int64)
        # Applied when the bounds are read; most steps do not read them.
        self._noted_computed = CachedRequestData()
        self.slot_of: dict[str, int] = {}
        self._free_slots = list(range(max_num_reqs - 1, -1, -1))

    @property
    def num_reqs(self) -> int:
        return len(self.slot_of)

    def prefill_length(self, req_id: str) -> int | None:
        """Tokens known when the request was added, or None for a request without a slot."""
        slot = self.slot_of.get(req_id)
        return None if slot is None else int(self.prefill_len.host[slot])

    def take_slot(self, req_id: str) -> int:
        """Assign a free slot to the request."""
        assert self._free_slots, f"no free slot for {req_id}: the scheduler runs at most {self.max_num_reqs}"
        slot = self.slot_of[req_id] = self._free_slots.pop()
        return slot

    def free_slot(self, req_id: str) -> int | None:
        """Free the request's slot and return it; None for a request without one."""
        slot = self.slot_of.pop(req_id, None)
        if slot is not None:
            self._free_slots.append(slot)
        return slot

    def add(self, slot: int, request: NewRequestData) -> None:
        prefill = request.prefill_token_ids
        assert len(request.prompt_token_ids) <= len(prefill), f"{request.req_id} has a prompt longer than its prefill"
        self.all_token_ids.stage(slot, 0, prefill)
        self.total_len.stage(slot, 0, [len(prefill)])
        self.num_computed_tokens.stage(slot, 0, [request.num_computed_tokens])
        self._computed_upper_bound[slot] = request.num_computed_tokens
        self.prefill_len.set(slot, len(prefill))

    def set_drafts(self, slot: int, token_ids: Sequence[int]) -> None:
        """Stage a step's draft tokens; -1 stands for a draft that is on the device already."""
        for number, token_id in enumerate(token_ids):
            if token_id >= 0:
                self.draft_token_ids.stage(slot, number, [token_id])

    def note_computed(self, cached: CachedRequestData) -> None:
        """Store the scheduler's counts of computed tokens, for `num_computed_tokens_upper_bound`."""
        self._noted_computed = cached

    def num_computed_tokens_upper_bound(self, slots_np: np.ndarray) -> np.ndarray:
        """Upper bounds of computed tokens before the step, int64 [slots]. slots_np: slots of this step's requests."""
        noted, self._noted_computed = self._noted_computed, CachedRequestData()
        for req_id, num_computed_tokens in zip(noted.req_ids, noted.num_computed_tokens, strict=True):
            slot = self.slot_of.get(req_id)
            if slot is not None:
                self._computed_upper_bound[slot] = num_computed_tokens
        return self._computed_upper_bound.take(slots_np)

    def rollback(self, slot: int) -> None:
        for staged in (self.all_token_ids, self.total_len, self.num_computed_tokens):
            staged.discard(slot)

    def flush(self) -> None:
        flush_together(self._staged)

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:
        frame.batch.step.advance(outcome)

    def commit_computed(self, frame: Frame) -> None:
        frame.batch.step.advance(empty_outcome(frame.batch))

    def commit_sampled(self, frame: Frame, outcome: StepOutcome) -> None:
        # `commit_computed` has added the computed tokens: only the rejections are left to subtract.
        tensors = frame.batch.layout.tensors
        num_computed_R = tensors.num_scheduled_R[: tensors.num_reqs]
        outcome.num_rejected.add_(num_computed_R)
        frame.batch.step.advance(outcome)
        outcome.num_rejected.sub_(num_computed_R)


def empty_outcome(batch: InputBatch) -> StepOutcome:
    """An outcome in the step's own table: no tokens, rejections or failures."""
    num_rows, device = len(batch.logits_rows.positions), batch.positions.device
    nothing = torch.zeros(num_rows, dtype=torch.int64, device=device)
    outcome, _ = batch.step.outcome(nothing, torch.zeros(num_rows, dtype=torch.bool, device=device))
    outcome.table_RX.zero_()
    return outcome
