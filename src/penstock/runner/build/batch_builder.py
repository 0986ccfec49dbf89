"""Batch builder: gathers the tensors of one step from the persistent state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock.attention import SequenceGeometry, StepGeometry
from penstock.device import Device
from penstock.kernels.bound_step import BoundStep, SlotTensors, StepTensors
from penstock.kernels.step_state import bind_step
from penstock.runner.block_tables import BlockTables
from penstock.runner.build.input_buffers import InputBuffers
from penstock.runner.build.layouts import Layouts
from penstock.runner.request_states import RequestStates
from penstock.step.batch import BatchLayout, BatchPlan, InputBatch
from penstock.step.logits_rows import LogitsRows

_NO_DRAFTS: Mapping[str, Sequence[int]] = {}


class BatchBuilder:
    """Gathers a step's inputs from the persistent state.

    whole_block_tables: give every step all columns of the block tables, for a graph that longer sequences run too.
    """

    def __init__(
        self,
        device: Device,
        requests: RequestStates,
        block_tables: BlockTables,
        buffers: InputBuffers,
        takes_drafts: Callable[[int], bool],
        *,
        whole_block_tables: bool = False,
    ) -> None:
        self._buffers = buffers.tensors
        self._whole_block_tables = whole_block_tables
        self._requests = requests
        self._block_sizes = tuple(block_tables.block_sizes)
        self._num_own_blocks = tuple(block_tables.num_own_blocks)
        self._tables = tuple(block_tables.table(group) for group in range(len(self._block_sizes)))
        self._layouts = Layouts(device, buffers, requests, takes_drafts)
        self._layout: BatchLayout
        self._step: BoundStep
        self._max_seq_len = 0
        self._num_columns: tuple[int, ...] = ()
        # Positions that the used columns of every block table cover.
        self._capacity = 0
        self._tensors: StepTensors
        self._batch: InputBatch

    def build(
        self, num_scheduled_tokens: Mapping[str, int], plan: BatchPlan, drafts: Mapping[str, Sequence[int]] = _NO_DRAFTS
    ) -> InputBatch:
        """Build the inputs of a step. num_scheduled_tokens: by request, the last of them its `drafts`."""
        layout = self._layouts.make(num_scheduled_tokens, plan, drafts)
        self._bind(layout)
        self._tensors = self._step.gather(self._num_columns)
        self._batch = self._wrap(layout, self._tensors)
        return self._batch

    def build_again(self) -> InputBatch:
        """Build the inputs of a step that repeats the layout of the last one, one token further.

        Returns the same object as for that step, with new values in its tensors, where they can be filled anew.
        """
        self._max_seq_len += 1
        if self._max_seq_len > self._capacity:
            self._reach(self._max_seq_len)
        tensors = self._step.gather(self._num_columns)
        if tensors is not self._tensors:
            self._tensors = tensors
            self._batch = self._wrap(self._layout, tensors)
        return self._batch

    def _bind(self, layout: BatchLayout) -> None:
        requests = self._requests
        state = SlotTensors(
            requests.all_token_ids.tensor,
            requests.total_len.tensor.view(-1),
            requests.num_computed_tokens.tensor.view(-1),
            requests.prefill_len.tensor,
            self._tables,
            self._block_sizes,
            requests.draft_token_ids.tensor,
        )
        self._layout, self._step = layout, bind_step(state, layout.tensors, self._buffers)
        # Whole tables cover any length.
        self._max_seq_len = 0 if self._whole_block_tables else self._max_seq_len_upper_bound(layout)
        self._reach(self._max_seq_len)

    def _reach(self, max_seq_len: int) -> None:
        """Set the number of used block table columns from the longest sequence."""
        groups = [
            (size, num_own, table.shape[1] - num_own)
            for size, num_own, table in zip(self._block_sizes, self._num_own_blocks, self._tables, strict=True)
        ]
        if self._whole_block_tables:
            max_seq_len = max((width * size for size, _, width in groups), default=0)
        self._num_columns = tuple(
            num_own + max(1, min(-(-max_seq_len // size), width)) for size, num_own, width in groups
        )
        covered = (
            (count - num_own) * size for count, (size, num_own, _) in zip(self._num_columns, groups, strict=True)
        )
        self._capacity = min(covered, default=max_seq_len)

    def _wrap(self, layout: BatchLayout, tensors: StepTensors) -> InputBatch:
        plan = layout.plan
        sequences = (
            layout.query_start_loc,
            layout.query_start_loc_np,
            tensors.seq_lens_R,
            plan.num_tokens,
            plan.num_reqs,
            layout.max_query_len,
        )
        geometry = tuple(
            StepGeometry(
                *sequences,
                block_table=block_table,
                slot_mapping=slot_mapping,
                max_seq_len_upper_bound=(num_columns - num_own) * block_size if layout.req_ids else 0,
                block_size=block_size,
                num_own_blocks=num_own,
                slots=layout.tensors.idx_mapping_R,
            )
            for block_table, slot_mapping, num_columns, block_size, num_own in zip(
                tensors.block_tables_RB,
                tensors.slot_mappings_T,
                self._num_columns,
                self._block_sizes,
                self._num_own_blocks,
                strict=True,
            )
        )
        positions = layout.of_logits_rows(tensors.positions_T)
        rows = LogitsRows(layout.logits_slots, layout.logits_slots_np, positions, layout.drafts)
        ids, of_sequences = tensors.input_ids_T, SequenceGeometry(*sequences)
        return InputBatch(layout, ids, tensors.positions_T, of_sequences, geometry, rows, self._step)

    def _max_seq_len_upper_bound(self, layout: BatchLayout) -> int:
        if not layout.req_ids:
            return 0
        computed = self._requests.num_computed_tokens_upper_bound(layout.slots_np)
        return int(np.add(computed, layout.counts_np, out=computed).max())
