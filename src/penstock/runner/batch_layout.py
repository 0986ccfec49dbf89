"""Which token of a step belongs to which request: what the host knows exactly, and its copy on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.device import Device
from penstock.kernels.bound_step import LayoutTensors
from penstock.runner.batch_plan import BatchPlan
from penstock.runner.request_states import RequestStates


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Requests by rising number of tokens, so decodes come first; then padding. Never changed once it is made.

    Padding tokens belong to the last row, which is a padding row where there is one.

    req_ids, slots_np, counts_np: of the actual requests, in batch order. query_start_loc_np: int64 [rows + 1].
    is_all_decodes: every request has one token. has_one_token_each: and none is padding.
    On the device: query_start_loc int32 [rows + 1]; slots int64 [actual requests]; logits_indices int64 [actual
    requests], last token of each; tensors: int64, rows and tokens.
    """

    plan: BatchPlan
    req_ids: list[str]
    slots_np: np.ndarray
    counts_np: np.ndarray
    query_start_loc_np: np.ndarray
    max_query_len: int
    is_all_decodes: bool
    has_one_token_each: bool
    query_start_loc: Tensor
    slots: Tensor
    logits_indices: Tensor
    tensors: LayoutTensors

    def last_rows(self, per_token: Tensor) -> Tensor:
        """The rows of each actual request's last token, of something that has one per token of the step."""
        return per_token if self.has_one_token_each else per_token.index_select(0, self.logits_indices)


class _OneTokenEach:
    """Layouts of steps in which every request has one token and nothing is padding: all but the slots is known before.

    What it knows it has for the most requests there may be; fewer of them take a part of it.
    """

    def __init__(self, device: Device, max_num_reqs: int) -> None:
        self._device = device
        self._counts, self._starts = np.ones(max_num_reqs, dtype=np.int64), np.arange(max_num_reqs + 1)
        arrays = self._counts, self._starts, np.zeros_like(self._counts)
        self._counts_R, self._numbers_R, self._zeros_R = map(device.upload, arrays)
        self._starts_R = self._numbers_R.int()

    def lay_out(self, req_ids: list[str], slots: np.ndarray, plan: BatchPlan) -> BatchLayout:
        num_reqs = len(req_ids)
        numbers_R = self._numbers_R[:num_reqs]
        slots_R = self._device.upload(slots)
        return BatchLayout(
            plan=plan,
            req_ids=req_ids,
            slots_np=slots,
            counts_np=self._counts[:num_reqs],
            query_start_loc_np=self._starts[: num_reqs + 1],
            max_query_len=min(1, num_reqs),
            is_all_decodes=True,
            has_one_token_each=True,
            query_start_loc=self._starts_R[: num_reqs + 1],
            slots=slots_R,
            logits_indices=numbers_R,
            tensors=LayoutTensors(
                slots_R, self._counts_R[:num_reqs], numbers_R, self._zeros_R[:num_reqs], num_reqs, num_reqs
            ),
        )


def _lay_out(
    device: Device, req_ids: list[str], slots: np.ndarray, counts: np.ndarray, plan: BatchPlan, padding_slot: int
) -> BatchLayout:
    """Any layout, carried to the device in one copy."""
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
    parts = (idx_mapping, num_scheduled, query_start_loc, token_to_req, token_offset, logits_indices)
    (idx_mapping_R, num_scheduled_R, starts_R, token_to_req_T, token_offset_T, last_R) = device.upload(
        np.concatenate(parts)
    ).split([len(part) for part in parts])
    return BatchLayout(
        plan=plan,
        req_ids=req_ids,
        slots_np=slots,
        counts_np=counts,
        query_start_loc_np=query_start_loc,
        max_query_len=int(counts.max(initial=0)),
        is_all_decodes=num_tokens == num_reqs,
        has_one_token_each=False,
        query_start_loc=starts_R.int(),
        slots=idx_mapping_R[:num_reqs],
        logits_indices=last_R,
        tensors=LayoutTensors(idx_mapping_R, num_scheduled_R, token_to_req_T, token_offset_T, num_reqs, num_tokens),
    )


class Layouts:
    """Makes the layout of each step."""

    def __init__(self, device: Device, requests: RequestStates) -> None:
        self._device = device
        self._requests = requests
        self._one_token_each = _OneTokenEach(device, requests.padding_slot)

    def make(self, num_scheduled_tokens: Mapping[str, int], plan: BatchPlan) -> BatchLayout:
        """The layout of a step that runs so many tokens of each request."""
        if plan.num_tokens_padded == plan.num_tokens == plan.num_reqs:
            req_ids = list(num_scheduled_tokens)
            return self._one_token_each.lay_out(req_ids, self._slots_of(req_ids), plan)
        req_ids, counts = _order_by_count(num_scheduled_tokens)
        padding_slot = self._requests.padding_slot
        return _lay_out(self._device, req_ids, self._slots_of(req_ids), counts, plan, padding_slot)

    def _slots_of(self, req_ids: list[str]) -> np.ndarray:
        slot_of = self._requests.slot_of
        return np.array([slot_of[req_id] for req_id in req_ids], dtype=np.int64)


def _order_by_count(num_scheduled_tokens: Mapping[str, int]) -> tuple[list[str], np.ndarray]:
    """Requests by rising number of tokens, equal ones in the order given."""
    req_ids = list(num_scheduled_tokens)
    counts = np.fromiter(num_scheduled_tokens.values(), np.int64, len(req_ids))
    if (counts[1:] >= counts[:-1]).all():
        return req_ids, counts
    order = counts.argsort(kind="stable")
    return [req_ids[i] for i in order.tolist()], counts[order]
