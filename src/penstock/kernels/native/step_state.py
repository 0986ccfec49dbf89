"""`kernels.bound_step` in C++: one call instead of a dozen numpy calls, whose cost is overhead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.bound_step import BoundStep, LayoutTensors, SlotTensors, StepOutcome, StepTensors, TokensOnHost
from penstock.kernels.native.library import StoredArguments


class NativeStep(BoundStep):
    """Precomputes all addresses. All tensors are contiguous CPU tensors. buffers: of the largest step."""

    def __init__(self, module: Any, state: SlotTensors, layout: LayoutTensors, buffers: StepTensors) -> None:
        self._gather = module.gather_step
        self._count = module.step_outcome
        self._record = module.advance_state
        self._state = state
        self._layout = layout
        self._buffers = buffers
        self._tensors: StepTensors
        self._num_columns: tuple[int, ...] | None = None
        self._gather_arguments = StoredArguments([])
        num_columns = 1 + layout.max_drafts
        self._drafts = _draft_arguments(state, layout)
        self._outcome = StepOutcome(torch.empty(layout.num_reqs, num_columns + 3, dtype=torch.int64))
        self._outcome_arguments = StoredArguments(
            [
                buffers.seq_lens_R.data_ptr(),
                state.prefill_len_S.data_ptr(),
                layout.idx_mapping_R.data_ptr(),
                layout.num_reqs,
                num_columns,
                self._outcome.table_RX.data_ptr(),
                *self._drafts,
            ]
        )
        self._advance_arguments = StoredArguments(
            [
                state.all_token_ids_SL.data_ptr(),
                state.all_token_ids_SL.shape[1],
                state.total_len_S.data_ptr(),
                state.num_computed_tokens_S.data_ptr(),
                layout.idx_mapping_R.data_ptr(),
                layout.num_scheduled_R.data_ptr(),
                layout.num_reqs,
                num_columns,
                self._outcome.table_RX.data_ptr(),
            ]
        )

    def gather(self, num_columns: tuple[int, ...]) -> StepTensors:
        if num_columns != self._num_columns:
            self._take_columns(num_columns)
        self._gather(self._gather_arguments.address)
        return self._tensors

    def outcome(self, sampled_token_ids_L: Tensor, failures_L: Tensor) -> tuple[StepOutcome, TokensOnHost | None]:
        on_host: TokensOnHost = self._count(
            self._outcome_arguments.address,
            sampled_token_ids_L.data_ptr(),
            failures_L.data_ptr(),
            failures_L.element_size(),
        )
        return self._outcome, on_host

    def advance(self, outcome: StepOutcome) -> None:
        assert outcome is self._outcome, "advance takes the step's own outcome"
        self._record(self._advance_arguments.address)

    def _take_columns(self, num_columns: tuple[int, ...]) -> None:
        state, layout = self._state, self._layout
        num_rows = layout.idx_mapping_R.shape[0]
        self._tensors = tensors = self._buffers.part(layout.token_to_req_T.shape[0], num_rows, num_columns)
        self._num_columns = num_columns
        arguments = [
            state.all_token_ids_SL.data_ptr(),
            state.all_token_ids_SL.shape[1],
            state.num_computed_tokens_S.data_ptr(),
            layout.idx_mapping_R.data_ptr(),
            layout.num_scheduled_R.data_ptr(),
            layout.token_to_req_T.data_ptr(),
            layout.token_offset_T.data_ptr(),
            num_rows,
            layout.token_to_req_T.shape[0],
            layout.num_tokens,
            tensors.input_ids_T.data_ptr(),
            tensors.positions_T.data_ptr(),
            tensors.seq_lens_R.data_ptr(),
            *self._drafts,
            state.total_len_S.data_ptr(),
            len(num_columns),
        ]
        groups = zip(
            state.block_tables_SB, state.block_sizes, tensors.block_tables_RB, tensors.slot_mappings_T, strict=True
        )
        for all_blocks, block_size, blocks, slot_mapping in groups:
            arguments += [
                all_blocks.data_ptr(),
                all_blocks.shape[1],
                block_size,
                blocks.data_ptr(),
                blocks.shape[1],
                blocks.stride(0),
                slot_mapping.data_ptr(),
            ]
        self._gather_arguments = StoredArguments(arguments)


def _draft_arguments(state: SlotTensors, layout: LayoutTensors) -> list[int]:
    """Library arguments of the drafts."""
    drafts, table = layout.drafts, state.draft_token_ids_SD
    if drafts is None:
        return [0] * 6
    tensors = drafts.num_drafts_R, drafts.num_checked_R, drafts.first_row_R
    return [table.data_ptr(), table.shape[1], *(tensor.data_ptr() for tensor in tensors), layout.num_reqs]
