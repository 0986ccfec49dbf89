"""How a step reads and advances the runner's per-slot state.

The functions are the specification, in plain torch, and what a GPU runs, or a CPU without the C++ kernels. With them
the same is done by `kernels.native.step_state`: the tensors are tiny, and calling torch's operators is what costs.

Suffixes: S slots (one more than max_num_reqs: the last is the padding slot), T tokens of the step, R requests of the
step, L positions, B blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.bound_step import BoundStep, LayoutTensors, SlotTensors, StepTensors, TokensOnHost
from penstock.kernels.native import bind_native_step

PAD_SLOT_ID = -1


class StepInputs(NamedTuple):
    """input_ids_T int32, positions_T int64, seq_lens_R int32 (positions that each request has after the step)."""

    input_ids_T: Tensor
    positions_T: Tensor
    seq_lens_R: Tensor


def gather_step_inputs(
    all_token_ids_SL: Tensor,
    num_computed_tokens_S: Tensor,
    idx_mapping_R: Tensor,
    num_scheduled_R: Tensor,
    token_to_req_T: Tensor,
    token_offset_T: Tensor,
) -> StepInputs:
    """The tokens that a step runs, read from the device's own state.

    Prompt tokens and sampled tokens lie in the same table, so prefill and decode are the same gather: token t of
    request r is at position num_computed_tokens[r] + offset of t within its request.

    all_token_ids_SL: int32. num_computed_tokens_S: int64. idx_mapping_R: int64, slot of each request.
    num_scheduled_R: int64. token_to_req_T, token_offset_T: int64, request of each token, and its offset there.
    """
    num_computed_R = num_computed_tokens_S.index_select(0, idx_mapping_R)
    positions_T = num_computed_R.index_select(0, token_to_req_T) + token_offset_T
    row_T = idx_mapping_R.index_select(0, token_to_req_T)
    flat_T = row_T * all_token_ids_SL.shape[1] + positions_T
    input_ids_T = all_token_ids_SL.view(-1).index_select(0, flat_T)
    seq_lens_R = (num_computed_R + num_scheduled_R).to(torch.int32)
    return StepInputs(input_ids_T, positions_T, seq_lens_R)


def compute_slot_mapping(
    block_tables_SB: Tensor,
    idx_mapping_R: Tensor,
    token_to_req_T: Tensor,
    positions_T: Tensor,
    block_size: int,
    num_actual_tokens: int,
) -> Tensor:
    """Where each token's key and value are written.

    block_tables_SB: int32, block ids of each slot. positions_T: int64.
    Returns int64 [T]: block id * block_size + offset in the block; PAD_SLOT_ID from `num_actual_tokens` on.
    """
    block_T = torch.div(positions_T, block_size, rounding_mode="floor")
    flat_T = idx_mapping_R.index_select(0, token_to_req_T) * block_tables_SB.shape[1] + block_T
    block_id_T = block_tables_SB.view(-1).index_select(0, flat_T).to(torch.int64)
    slot_mapping_T = block_id_T * block_size + (positions_T - block_T * block_size)
    if num_actual_tokens < slot_mapping_T.shape[0]:
        slot_mapping_T[num_actual_tokens:] = PAD_SLOT_ID
    return slot_mapping_T


def count_sampled(seq_lens_R: Tensor, prefill_len_S: Tensor, idx_mapping_R: Tensor) -> Tensor:
    """int64 [R]: 1 where the step reached the end of the known tokens, 0 for an unfinished prefill."""
    return (seq_lens_R >= prefill_len_S.index_select(0, idx_mapping_R)).to(torch.int64)


def advance_state(
    all_token_ids_SL: Tensor,
    total_len_S: Tensor,
    num_computed_tokens_S: Tensor,
    idx_mapping_R: Tensor,
    sampled_token_ids_R: Tensor,
    num_sampled_R: Tensor,
    num_scheduled_R: Tensor,
) -> None:
    """Record a step's outcome in place: append sampled tokens, advance total_len and num_computed_tokens.

    sampled_token_ids_R: int64. num_sampled_R: int64, 0 or 1. All rows of `idx_mapping_R` must be real slots.
    """
    total_len_R = total_len_S.index_select(0, idx_mapping_R)
    flat_R = idx_mapping_R * all_token_ids_SL.shape[1] + total_len_R
    tokens = all_token_ids_SL.view(-1)
    kept_R = torch.where(num_sampled_R > 0, sampled_token_ids_R.to(torch.int32), tokens.index_select(0, flat_R))
    tokens.index_copy_(0, flat_R, kept_R)
    total_len_S.index_add_(0, idx_mapping_R, num_sampled_R)
    num_computed_tokens_S.index_add_(0, idx_mapping_R, num_scheduled_R)


class PlainStep(BoundStep):
    """A bound step of separate functions, with new tensors every time."""

    def __init__(self, state: SlotTensors, layout: LayoutTensors) -> None:
        self._state = state
        self._layout = layout
        self._slots = layout.idx_mapping_R[: layout.num_reqs]
        self._num_scheduled = layout.num_scheduled_R[: layout.num_reqs]
        self._seq_lens: Tensor | None = None

    def gather(self, num_columns: tuple[int, ...]) -> StepTensors:
        state, layout = self._state, self._layout
        inputs = gather_step_inputs(
            state.all_token_ids_SL,
            state.num_computed_tokens_S,
            layout.idx_mapping_R,
            layout.num_scheduled_R,
            layout.token_to_req_T,
            layout.token_offset_T,
        )
        self._seq_lens = inputs.seq_lens_R[: layout.num_reqs]
        tables, slot_mappings = [], []
        for table, block_size, width in zip(state.block_tables_SB, state.block_sizes, num_columns, strict=True):
            tables.append(table[:, :width].index_select(0, layout.idx_mapping_R))
            slot_mappings.append(
                compute_slot_mapping(
                    table,
                    layout.idx_mapping_R,
                    layout.token_to_req_T,
                    inputs.positions_T,
                    block_size,
                    layout.num_tokens,
                )
            )
        return StepTensors(*inputs, tuple(tables), tuple(slot_mappings))

    def outcome(self, sampled_token_ids_R: Tensor, failures_R: Tensor) -> tuple[Tensor, TokensOnHost | None]:
        assert self._seq_lens is not None, "gather comes first"
        num_sampled_R = count_sampled(self._seq_lens, self._state.prefill_len_S, self._slots)
        return torch.stack([sampled_token_ids_R, num_sampled_R, failures_R.to(torch.int64)]), None

    def advance(self, outcome_3R: Tensor) -> None:
        advance_state(
            self._state.all_token_ids_SL,
            self._state.total_len_S,
            self._state.num_computed_tokens_S,
            self._slots,
            outcome_3R[0],
            outcome_3R[1],
            self._num_scheduled,
        )


def bind_step(state: SlotTensors, layout: LayoutTensors) -> BoundStep:
    """The best calls for where the tensors are; the same meaning everywhere."""
    native = bind_native_step(state, layout) if state.all_token_ids_SL.is_cpu else None
    return native or PlainStep(state, layout)
