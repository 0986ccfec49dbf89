"""Gathering of a step's inputs from the runner's per-slot state, and its update by the step's outcome.

The functions are the specification, in plain torch. `kernels.native.step_state` replaces them on CPUs with the C++
kernels, `kernels.triton.step_state` on GPUs with Triton: the tensors are tiny, and the cost is torch's call overhead.

Suffixes: S slots (one more than max_num_reqs: the last is the padding slot), T tokens of the step, R requests of the
step, L positions or logits rows, B blocks, D drafts of a request, X columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.bound_step import (
    BoundStep,
    DraftTensors,
    LayoutTensors,
    SlotTensors,
    StepOutcome,
    StepTensors,
    TokensOnHost,
)
from penstock.kernels.native import bind_native_step
from penstock.kernels.triton import triton_runs

PAD_SLOT_ID = -1


class StepInputs(NamedTuple):
    """input_ids_T int32, positions_T int64, seq_lens_R int32 (length of each request after the step)."""

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
    """Gather a step's tokens and positions from the device state.

    Prompt tokens and sampled tokens are in the same table, so prefill and decode are the same gather: token t of
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
    """Compute the slot mapping: flat KV position of each token.

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


def write_drafts(
    all_token_ids_SL: Tensor,
    total_len_S: Tensor,
    draft_token_ids_SD: Tensor,
    idx_mapping_R: Tensor,
    num_drafts_R: Tensor,
    max_drafts: int,
) -> None:
    """Write each request's drafts after its known tokens, in place, where the step and the sampler read them.

    all_token_ids_SL, draft_token_ids_SD: int32. num_drafts_R: int64, at most max_drafts. A draft of -1 (none) is
    replaced by a token that `verify_drafts` does not accept.
    """
    tokens = all_token_ids_SL.view(-1)
    end_R = idx_mapping_R * all_token_ids_SL.shape[1] + total_len_S.index_select(0, idx_mapping_R)
    drafts_RD = draft_token_ids_SD.index_select(0, idx_mapping_R).clamp(min=0)
    for number in range(max_drafts):
        # Requests with fewer drafts rewrite their last cell with its own value.
        cell_R = end_R + num_drafts_R.clamp(max=number + 1).sub(1).clamp(min=0)
        draft_R = torch.where(num_drafts_R > number, drafts_RD[:, number], tokens.index_select(0, cell_R))
        tokens.index_copy_(0, cell_R, draft_R)


def verify_drafts(
    sampled_token_ids_L: Tensor,
    failures_L: Tensor,
    is_complete_R: Tensor,
    draft_token_ids_RD: Tensor,
    drafts: DraftTensors,
) -> StepOutcome:
    """Verify drafts: the outcome has each request's accepted tokens.

    A draw depends on (seed, position) and the tokens before it, so draft j is accepted while it equals the token
    sampled at the row before it. A failed row has no token, and the row before it is the last accepted: the failure
    repeats in the next step, as it would without drafts.

    sampled_token_ids_L: int64; a request's first row is that of its last known token, then one after each verified
    draft.
    failures_L: bool or int64. is_complete_R: bool, false for an unfinished prefill, which samples nothing.
    draft_token_ids_RD: int32. The failure of a request is that of its first row.
    """
    is_good_L = failures_L == 0
    accepted_R = torch.zeros_like(drafts.num_drafts_R)
    goes_on_R = torch.ones_like(is_complete_R)
    for number in range(drafts.max_drafts):
        goes_on_R = goes_on_R & (drafts.num_checked_R > number)
        row_R = torch.where(goes_on_R, drafts.first_row_R + number, 0)
        next_row_R = torch.where(goes_on_R, row_R + 1, 0)
        is_same_R = sampled_token_ids_L.index_select(0, row_R) == draft_token_ids_RD[:, number]
        are_good_R = is_good_L.index_select(0, row_R) & is_good_L.index_select(0, next_row_R)
        goes_on_R = goes_on_R & is_same_R & are_good_R
        accepted_R = accepted_R + goes_on_R
    columns_S = torch.arange(1 + drafts.max_drafts, device=accepted_R.device)
    row_RS = drafts.first_row_R.unsqueeze(-1) + torch.minimum(columns_S, accepted_R.unsqueeze(-1))
    return _outcome(
        sampled_token_ids_L[row_RS],
        torch.where(is_complete_R, 1 + accepted_R, 0),
        drafts.num_drafts_R - accepted_R,
        failures_L.index_select(0, drafts.first_row_R),
    )


def _outcome(
    sampled_token_ids_RS: Tensor, num_sampled_R: Tensor, num_rejected_R: Tensor, failures_R: Tensor
) -> StepOutcome:
    counts_R3 = torch.stack([num_sampled_R, num_rejected_R, failures_R.to(torch.int64)], dim=1)
    return StepOutcome(torch.cat([sampled_token_ids_RS, counts_R3], dim=1))


def advance_state(
    all_token_ids_SL: Tensor,
    total_len_S: Tensor,
    num_computed_tokens_S: Tensor,
    idx_mapping_R: Tensor,
    num_scheduled_R: Tensor,
    outcome: StepOutcome,
) -> None:
    """Update the state in place: append sampled tokens, advance total_len and num_computed_tokens.

    num_scheduled_R: int64. All rows of `idx_mapping_R` must be real slots.
    """
    sampled_RS, num_sampled_R = outcome.sampled_token_ids, outcome.num_sampled
    total_len_R = total_len_S.index_select(0, idx_mapping_R)
    end_R = idx_mapping_R * all_token_ids_SL.shape[1] + total_len_R
    tokens = all_token_ids_SL.view(-1)
    for number in range(sampled_RS.shape[1]):
        # Requests with fewer tokens rewrite their last cell with its own value.
        cell_R = end_R + num_sampled_R.clamp(max=number + 1).sub(1).clamp(min=0)
        is_sampled_R = num_sampled_R > number
        kept_R = torch.where(is_sampled_R, sampled_RS[:, number].to(torch.int32), tokens.index_select(0, cell_R))
        tokens.index_copy_(0, cell_R, kept_R)
    total_len_S.index_add_(0, idx_mapping_R, num_sampled_R)
    num_computed_tokens_S.index_add_(0, idx_mapping_R, num_scheduled_R - outcome.num_rejected)


class PlainStep(BoundStep):
    """A bound step of separate torch functions. buffers: of the largest step."""

    def __init__(self, state: SlotTensors, layout: LayoutTensors, buffers: StepTensors) -> None:
        self._state = state
        self._layout = layout
        self._buffers = buffers
        self._num_columns: tuple[int, ...] | None = None
        self._tensors: StepTensors
        self._slots = layout.idx_mapping_R[: layout.num_reqs]
        self._num_scheduled = layout.num_scheduled_R[: layout.num_reqs]
        self._seq_lens: Tensor | None = None

    def gather(self, num_columns: tuple[int, ...]) -> StepTensors:
        state, layout = self._state, self._layout
        if layout.drafts is not None:
            write_drafts(
                state.all_token_ids_SL,
                state.total_len_S,
                state.draft_token_ids_SD,
                self._slots,
                layout.drafts.num_drafts_R,
                layout.drafts.max_drafts,
            )
        inputs = gather_step_inputs(
            state.all_token_ids_SL,
            state.num_computed_tokens_S,
            layout.idx_mapping_R,
            layout.num_scheduled_R,
            layout.token_to_req_T,
            layout.token_offset_T,
        )
        if num_columns != self._num_columns:
            sizes = len(layout.token_to_req_T), len(layout.idx_mapping_R)
            self._num_columns, self._tensors = num_columns, self._buffers.part(*sizes, num_columns)
        tensors = self._tensors
        tensors.input_ids_T.copy_(inputs.input_ids_T)
        tensors.positions_T.copy_(inputs.positions_T)
        tensors.seq_lens_R.copy_(inputs.seq_lens_R)
        self._seq_lens = tensors.seq_lens_R[: layout.num_reqs]
        groups = zip(
            state.block_tables_SB, state.block_sizes, tensors.block_tables_RB, tensors.slot_mappings_T, strict=True
        )
        for all_blocks, block_size, blocks, slot_mapping in groups:
            blocks.copy_(all_blocks[:, : blocks.shape[1]].index_select(0, layout.idx_mapping_R))
            slot_mapping.copy_(
                compute_slot_mapping(
                    all_blocks,
                    layout.idx_mapping_R,
                    layout.token_to_req_T,
                    tensors.positions_T,
                    block_size,
                    layout.num_tokens,
                )
            )
        return tensors

    def outcome(self, sampled_token_ids_L: Tensor, failures_L: Tensor) -> tuple[StepOutcome, TokensOnHost | None]:
        assert self._seq_lens is not None, "gather comes first"
        drafts, known_len_R = self._layout.drafts, self._state.prefill_len_S.index_select(0, self._slots)
        if drafts is None:
            num_sampled_R = (self._seq_lens >= known_len_R).to(torch.int64)
            return _outcome(
                sampled_token_ids_L.unsqueeze(-1), num_sampled_R, torch.zeros_like(num_sampled_R), failures_L
            ), None
        is_complete_R = self._seq_lens - drafts.num_drafts_R >= known_len_R
        draft_ids_RD = self._state.draft_token_ids_SD.index_select(0, self._slots)
        return verify_drafts(sampled_token_ids_L, failures_L, is_complete_R, draft_ids_RD, drafts), None

    def advance(self, outcome: StepOutcome) -> None:
        advance_state(
            self._state.all_token_ids_SL,
            self._state.total_len_S,
            self._state.num_computed_tokens_S,
            self._slots,
            self._num_scheduled,
            outcome,
        )


def bind_step(state: SlotTensors, layout: LayoutTensors, buffers: StepTensors) -> BoundStep:
    """Bind a step to the fastest implementation for its tensors. buffers: of the largest step."""
    if state.all_token_ids_SL.is_cpu:
        native = bind_native_step(state, layout, buffers)
        if native is not None:
            return native
    if triton_runs(state.all_token_ids_SL):
        from penstock.kernels.triton.step_state import TritonStep

        return TritonStep(state, layout, buffers)
    return PlainStep(state, layout, buffers)
