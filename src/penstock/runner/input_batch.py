"""From a scheduling decision to the tensors of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.attention import StepGeometry
from penstock.device import Device
from penstock.kernels.step_state import step_state_kernels
from penstock.runner.batch_plan import BatchPlan
from penstock.runner.block_tables import BlockTables
from penstock.runner.request_states import RequestStates


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's requests, ordered by their number of tokens, so that decodes come first.

    req_ids: in batch order, a copy, since slots may change hands while the step is in flight.
    idx_mapping: int64 [reqs], slot of each request; padding maps to the padding slot. idx_mapping_np: without padding.
    num_scheduled: int64 [reqs]; num_scheduled_np: without padding.
    logits_indices: int64 [actual reqs], last token of each request.
    input_ids: int32 [tokens]. positions: int64 [tokens]. seq_lens: int32 [reqs].
    geometry: per KV-cache group, what attention needs.
    """

    plan: BatchPlan
    req_ids: list[str]
    idx_mapping: Tensor
    idx_mapping_np: np.ndarray
    num_scheduled: Tensor
    num_scheduled_np: np.ndarray
    logits_indices: Tensor
    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    geometry: tuple[StepGeometry, ...]


class BatchBuilder:
    """Gathers a step's inputs from the persistent state; knows nothing of what is done with them."""

    def __init__(self, device: Device, requests: RequestStates, block_tables: BlockTables) -> None:
        self._device = device
        self._requests = requests
        self._block_tables = block_tables
        self._kernels = step_state_kernels(device.torch_device)

    def build(self, num_scheduled_tokens: Mapping[str, int], plan: BatchPlan) -> InputBatch:
        """The inputs of a step that runs `num_scheduled_tokens[req_id]` tokens of each request."""
        req_ids, counts = _order_by_count(num_scheduled_tokens)
        slot_of = self._requests.slot_of
        slots = np.fromiter((slot_of[req_id] for req_id in req_ids), np.int64, len(req_ids))
        layout = _Layout.make(slots, counts, plan, self._requests.padding_slot)
        fields = layout.upload(self._device)

        inputs = self._kernels.gather_step_inputs(
            self._requests.all_token_ids.tensor,
            self._requests.num_computed_tokens.tensor.view(-1),
            fields.idx_mapping,
            fields.num_scheduled,
            fields.token_to_req,
            fields.token_offset,
        )
        return InputBatch(
            plan=plan,
            req_ids=req_ids,
            idx_mapping=fields.idx_mapping,
            idx_mapping_np=slots,
            num_scheduled=fields.num_scheduled,
            num_scheduled_np=counts,
            logits_indices=fields.query_start_loc[1 : plan.num_reqs + 1] - 1,
            input_ids=inputs.input_ids_T,
            positions=inputs.positions_T,
            seq_lens=inputs.seq_lens_R,
            geometry=self._geometry(layout, fields, inputs.positions_T, inputs.seq_lens_R),
        )

    def _geometry(
        self, layout: _Layout, fields: _DeviceLayout, positions: Tensor, seq_lens: Tensor
    ) -> tuple[StepGeometry, ...]:
        plan = layout.plan
        computed_upper_bound = self._requests.num_computed_tokens_upper_bound[layout.idx_mapping[: plan.num_reqs]]
        max_seq_len = int((computed_upper_bound + layout.num_scheduled[: plan.num_reqs]).max(initial=0))
        query_start_loc = fields.query_start_loc.int()
        query_start_loc_np = layout.query_start_loc
        geometries = []
        for group, block_size in enumerate(self._block_tables.block_sizes):
            table = self._block_tables.table(group)
            width = max(1, min(-(-max_seq_len // block_size), table.shape[1]))
            geometries.append(
                StepGeometry(
                    query_start_loc=query_start_loc,
                    query_start_loc_np=query_start_loc_np,
                    seq_lens=seq_lens,
                    block_table=table[:, :width].index_select(0, fields.idx_mapping),
                    slot_mapping=self._kernels.compute_slot_mapping(
                        table, fields.idx_mapping, fields.token_to_req, positions, block_size, plan.num_tokens
                    ),
                    num_actual_tokens=plan.num_tokens,
                    num_actual_reqs=plan.num_reqs,
                    max_query_len=int(layout.num_scheduled.max(initial=0)),
                    max_seq_len_upper_bound=max_seq_len,
                    block_size=block_size,
                )
            )
        return tuple(geometries)


def _order_by_count(num_scheduled_tokens: Mapping[str, int]) -> tuple[list[str], np.ndarray]:
    """Requests by rising number of tokens, equal ones in the order given."""
    req_ids = list(num_scheduled_tokens)
    counts = np.fromiter(num_scheduled_tokens.values(), np.int64, len(req_ids))
    if (counts[1:] >= counts[:-1]).all():
        return req_ids, counts
    order = counts.argsort(kind="stable")
    return [req_ids[i] for i in order.tolist()], counts[order]


@dataclass(frozen=True, slots=True)
class _DeviceLayout:
    """`_Layout` on the device, all int64."""

    idx_mapping: Tensor
    num_scheduled: Tensor
    query_start_loc: Tensor
    token_to_req: Tensor
    token_offset: Tensor


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which token belongs to which request, padding included; what the host knows exactly.

    Padding tokens belong to the last row, which is a padding row where there is one.
    """

    plan: BatchPlan
    idx_mapping: np.ndarray
    num_scheduled: np.ndarray
    query_start_loc: np.ndarray
    token_to_req: np.ndarray
    token_offset: np.ndarray

    @classmethod
    def make(cls, slots: np.ndarray, counts: np.ndarray, plan: BatchPlan, padding_slot: int) -> _Layout:
        # Padding tokens need a padding row, or they would be read as tokens of a real request.
        needs_row = plan.num_tokens_padded > plan.num_tokens and plan.num_reqs_padded == plan.num_reqs
        num_rows = plan.num_reqs_padded + needs_row
        idx_mapping = np.full(num_rows, padding_slot, dtype=np.int64)
        idx_mapping[: plan.num_reqs] = slots
        num_scheduled = np.zeros(num_rows, dtype=np.int64)
        num_scheduled[: plan.num_reqs] = counts
        query_start_loc = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(num_scheduled, out=query_start_loc[1:])

        token_to_req = np.full(plan.num_tokens_padded, num_rows - 1, dtype=np.int64)
        token_to_req[: plan.num_tokens] = np.repeat(np.arange(plan.num_reqs), counts)
        token_offset = np.zeros(plan.num_tokens_padded, dtype=np.int64)
        token_offset[: plan.num_tokens] = np.arange(plan.num_tokens) - query_start_loc[token_to_req[: plan.num_tokens]]
        return cls(plan, idx_mapping, num_scheduled, query_start_loc, token_to_req, token_offset)

    def upload(self, device: Device) -> _DeviceLayout:
        """Carry all fields over in one copy."""
        parts = (self.idx_mapping, self.num_scheduled, self.query_start_loc, self.token_to_req, self.token_offset)
        packed = device.upload(np.concatenate(parts))
        return _DeviceLayout(*packed.split([len(part) for part in parts]))
