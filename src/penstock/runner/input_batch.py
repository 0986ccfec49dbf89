"""From a scheduling decision to the tensors of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.attention import StepGeometry
from penstock.device import Device
from penstock.kernels.step_state import step_state_kernels
from penstock.runner.batch_layout import BatchLayout, LayoutCache
from penstock.runner.batch_plan import BatchPlan
from penstock.runner.block_tables import BlockTables
from penstock.runner.request_states import RequestStates


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs, in the order of its layout.

    input_ids: int32 [tokens]. positions: int64 [tokens]. seq_lens: int32 [rows].
    geometry: per KV-cache group, what attention needs.
    """

    layout: BatchLayout
    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    geometry: tuple[StepGeometry, ...]


class BatchBuilder:
    """Gathers a step's inputs from the persistent state; knows nothing of what is done with them."""

    def __init__(self, device: Device, requests: RequestStates, block_tables: BlockTables) -> None:
        self._requests = requests
        self._block_tables = block_tables
        self._layouts = LayoutCache(device, requests)
        self._kernels = step_state_kernels(device.torch_device)

    def build(self, num_scheduled_tokens: Mapping[str, int], plan: BatchPlan) -> InputBatch:
        """The inputs of a step that runs `num_scheduled_tokens[req_id]` tokens of each request."""
        layout = self._layouts.get(num_scheduled_tokens, plan)
        inputs = self._kernels.gather_step_inputs(
            self._requests.all_token_ids.tensor,
            self._requests.num_computed_tokens.tensor.view(-1),
            layout.idx_mapping,
            layout.num_scheduled,
            layout.token_to_req,
            layout.token_offset,
        )
        return InputBatch(
            layout=layout,
            input_ids=inputs.input_ids_T,
            positions=inputs.positions_T,
            seq_lens=inputs.seq_lens_R,
            geometry=self._geometry(layout, inputs.positions_T, inputs.seq_lens_R),
        )

    def _geometry(self, layout: BatchLayout, positions: Tensor, seq_lens: Tensor) -> tuple[StepGeometry, ...]:
        plan = layout.plan
        max_seq_len = self._max_seq_len_upper_bound(layout)
        geometries = []
        for group, block_size in enumerate(self._block_tables.block_sizes):
            table = self._block_tables.table(group)
            width = max(1, min(-(-max_seq_len // block_size), table.shape[1]))
            geometries.append(
                StepGeometry(
                    query_start_loc=layout.query_start_loc,
                    query_start_loc_np=layout.query_start_loc_np,
                    seq_lens=seq_lens,
                    block_table=table[:, :width].index_select(0, layout.idx_mapping),
                    slot_mapping=self._kernels.compute_slot_mapping(
                        table, layout.idx_mapping, layout.token_to_req, positions, block_size, plan.num_tokens
                    ),
                    num_actual_tokens=plan.num_tokens,
                    num_actual_reqs=plan.num_reqs,
                    max_query_len=layout.max_query_len,
                    max_seq_len_upper_bound=max_seq_len,
                    block_size=block_size,
                )
            )
        return tuple(geometries)

    def _max_seq_len_upper_bound(self, layout: BatchLayout) -> int:
        if not layout.req_ids:
            return 0
        computed = self._requests.num_computed_tokens_upper_bound[layout.slots_np]
        return int(np.add(computed, layout.counts_np, out=computed).max())
