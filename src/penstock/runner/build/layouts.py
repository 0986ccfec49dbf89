"""Builder of layouts: request, slot and logits row of each token of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.device import Device
from penstock.kernels.bound_step import DraftTensors, LayoutTensors
from penstock.runner.build.input_buffers import InputBuffers
from penstock.runner.request_states import RequestStates
from penstock.step.batch import BatchLayout, BatchPlan
from penstock.step.logits_rows import DraftRows


class _OneTokenEach:
    """Precomputed layouts of pure decode steps: all but the slots is known at start.

    Tensors are sized for `max_num_reqs`; smaller batches take slices. A padding row has one token of the padding slot.
    """

    def __init__(self, device: Device, buffers: InputBuffers, max_num_reqs: int, padding_slot: int) -> None:
        self._buffers = buffers
        self._padding_slot = padding_slot
        self._counts, self._starts = np.ones(max_num_reqs, dtype=np.int64), np.arange(max_num_reqs + 1)
        arrays = self._counts, self._starts, np.zeros_like(self._counts)
        self._counts_R, self._numbers_R, self._zeros_R = map(device.upload, arrays)
        self._starts_R = self._numbers_R.int()

    def lay_out(self, req_ids: list[str], slots: np.ndarray, plan: BatchPlan) -> BatchLayout:
        num_reqs, num_rows = len(req_ids), plan.num_reqs_padded
        padding = np.full(num_rows - num_reqs, self._padding_slot)
        (rows_R,) = self._buffers.write_layout([np.concatenate((slots, padding)) if len(padding) else slots])
        numbers_R, slots_R = self._numbers_R[:num_rows], rows_R[:num_reqs]
        return BatchLayout(
            plan=plan,
            req_ids=req_ids,
            slots_np=slots,
            counts_np=self._counts[:num_reqs],
            query_start_loc_np=self._starts[: num_rows + 1],
            max_query_len=min(1, num_reqs),
            is_all_decodes=True,
            has_one_token_each=num_rows == num_reqs,
            query_start_loc=self._starts_R[: num_rows + 1],
            slots=slots_R,
            logits_slots_np=slots,
            logits_slots=slots_R,
            logits_indices=numbers_R[:num_reqs],
            tensors=LayoutTensors(
                rows_R, self._counts_R[:num_rows], numbers_R, self._zeros_R[:num_rows], num_reqs, num_reqs
            ),
        )


class DraftCounts(NamedTuple):
    """Draft tokens of a step's requests in batch order, and those that may be accepted; int64 each."""

    num_drafts: np.ndarray
    num_checked: np.ndarray

    def logits_rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Batch index of each logits row, its number within the request, and each request's first row; int64 each."""
        num_rows = 1 + self.num_checked
        batch_indices = np.repeat(np.arange(len(num_rows)), num_rows)
        first_rows = np.cumsum(num_rows) - num_rows
        return batch_indices, np.arange(len(batch_indices)) - first_rows[batch_indices], first_rows


def _lay_out(
    buffers: InputBuffers,
    req_ids: list[str],
    slots: np.ndarray,
    counts: np.ndarray,
    plan: BatchPlan,
    padding_slot: int,
    drafts: DraftCounts | None,
) -> BatchLayout:
    """Build a layout of the general form, and upload it in one copy."""
    num_reqs, num_tokens = plan.num_reqs, plan.num_tokens
    # Padding tokens need a padding row, or they would be read as tokens of a real request.
    needs_row = plan.num_tokens_padded > num_tokens and plan.num_reqs_padded == num_reqs
    num_rows = plan.num_reqs_padded + needs_row
    idx_mapping = np.full(num_rows, padding_slot, dtype=np.int64)
    idx_mapping[:num_reqs] = slots
    num_scheduled = np.zeros(num_rows, dtype=np.int64)
    num_scheduled[:num_reqs] = counts
    query_start_loc = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(num_scheduled, out=query_start_loc[1:])

    token_to_req = np.full(plan.num_tokens_padded, num_rows - 1, dtype=np.int64)
    token_to_req[:num_tokens] = np.repeat(np.arange(num_reqs), counts)
    token_offset = np.zeros(plan.num_tokens_padded, dtype=np.int64)
    token_offset[:num_tokens] = np.arange(num_tokens) - query_start_loc[token_to_req[:num_tokens]]

    logits_indices = query_start_loc[1 : num_reqs + 1] - 1
    logits_slots = slots
    draft_parts: tuple[np.ndarray, ...] = ()
    if drafts is not None:
        batch_indices, numbers, first_rows = drafts.logits_rows()
        logits_slots = slots[batch_indices]
        logits_indices = (logits_indices - drafts.num_drafts)[batch_indices] + numbers
        draft_parts = (logits_slots, numbers, *drafts, first_rows)
    parts = (idx_mapping, num_scheduled, query_start_loc, token_to_req, token_offset, logits_indices, *draft_parts)
    on_device = buffers.write_layout(parts)
    (idx_mapping_R, num_scheduled_R, starts_R, token_to_req_T, token_offset_T, logits_L, *more) = on_device
    draft_rows = draft_tensors = None
    if drafts is not None:
        draft_rows = DraftRows(batch_indices, numbers, more[1])
        draft_tensors = DraftTensors(more[2], more[3], more[4], int(drafts.num_drafts.max()))
    return BatchLayout(
        plan=plan,
        req_ids=req_ids,
        slots_np=slots,
        counts_np=counts,
        query_start_loc_np=query_start_loc,
        max_query_len=plan.most_tokens_of_request or int(counts.max(initial=0)),
        is_all_decodes=num_tokens == num_reqs,
        has_one_token_each=False,
        query_start_loc=buffers.write_starts(starts_R),
        slots=idx_mapping_R[:num_reqs],
        logits_slots_np=logits_slots,
        logits_slots=more[0] if more else idx_mapping_R[:num_reqs],
        logits_indices=logits_L,
        tensors=LayoutTensors(
            idx_mapping_R, num_scheduled_R, token_to_req_T, token_offset_T, num_reqs, num_tokens, draft_tensors
        ),
        drafts=draft_rows,
        num_drafts_np=None if drafts is None else drafts.num_drafts,
    )


class Layouts:
    """Builds the layout of each step. takes_drafts: whether drafts of the request in a slot may be accepted."""

    def __init__(
        self, device: Device, buffers: InputBuffers, requests: RequestStates, takes_drafts: Callable[[int], bool]
    ) -> None:
        self._takes_drafts = takes_drafts
        self._buffers = buffers
        self._requests = requests
        self._one_token_each = _OneTokenEach(device, buffers, requests.max_num_reqs, requests.padding_slot)

    def make(
        self, num_scheduled_tokens: Mapping[str, int], plan: BatchPlan, drafts: Mapping[str, Sequence[int]]
    ) -> BatchLayout:
        """Build the layout of a step. num_scheduled_tokens: by request, the last of them its `drafts`."""
        if plan.num_tokens == plan.num_reqs > 0 and plan.num_tokens_padded == plan.num_reqs_padded:
            req_ids = list(num_scheduled_tokens)
            return self._one_token_each.lay_out(req_ids, self._slots_of(req_ids), plan)
        req_ids, counts = _order_by_count(num_scheduled_tokens)
        padding_slot, slots = self._requests.padding_slot, self._slots_of(req_ids)
        draft_counts = self._count_drafts(req_ids, slots, drafts) if drafts else None
        return _lay_out(self._buffers, req_ids, slots, counts, plan, padding_slot, draft_counts)

    def _count_drafts(
        self, req_ids: list[str], slots: np.ndarray, drafts: Mapping[str, Sequence[int]]
    ) -> DraftCounts | None:
        num_drafts = np.array([len(drafts.get(req_id, ())) for req_id in req_ids])
        if not num_drafts.any():
            return None
        takes = np.array([self._takes_drafts(slot) for slot in slots.tolist()])
        return DraftCounts(num_drafts, num_drafts * takes)

    def _slots_of(self, req_ids: list[str]) -> np.ndarray:
        return np.fromiter(map(self._requests.slot_of.__getitem__, req_ids), np.int64, len(req_ids))


def _order_by_count(num_scheduled_tokens: Mapping[str, int]) -> tuple[list[str], np.ndarray]:
    """Sort requests by rising number of tokens, ties in the given order."""
    req_ids = list(num_scheduled_tokens)
    counts = np.fromiter(num_scheduled_tokens.values(), np.int64, len(req_ids))
    if (counts[1:] >= counts[:-1]).all():
        return req_ids, counts
    order = counts.argsort(kind="stable")
    return [req_ids[i] for i in order.tolist()], counts[order]
