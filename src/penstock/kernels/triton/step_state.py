"""`kernels.bound_step` in Triton: few launches, because the tensors are tiny and the cost is launch overhead.

Results equal those of `kernels.step_state.PlainStep`. No argument is specialised: sizes change with every step, and the
parts of a layout are views at any offset, so that specialising them would compile again and again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.bound_step import BoundStep, LayoutTensors, SlotTensors, StepOutcome, StepTensors, TokensOnHost

# Tokens or requests of a program, and block table columns that it copies at a time.
_BLOCK = 128
_PAD_SLOT_ID = tl.constexpr(-1)


@triton.jit(
    do_not_specialize=[
        "all_token_ids_SL",
        "row_length",
        "total_len_S",
        "num_computed_tokens_S",
        "draft_token_ids_SD",
        "draft_row_length",
        "idx_mapping_R",
        "num_scheduled_R",
        "token_to_req_T",
        "token_offset_T",
        "num_drafts_R",
        "input_ids_T",
        "positions_T",
        "seq_lens_R",
        "num_rows",
        "num_reqs",
        "num_tokens",
        "max_drafts",
    ]
)
def _gather_tokens(
    all_token_ids_SL,
    row_length,
    total_len_S,
    num_computed_tokens_S,
    draft_token_ids_SD,
    draft_row_length,
    idx_mapping_R,
    num_scheduled_R,
    token_to_req_T,
    token_offset_T,
    num_drafts_R,
    input_ids_T,
    positions_T,
    seq_lens_R,
    num_rows,
    num_reqs,
    num_tokens,
    max_drafts,
    HAS_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`write_drafts` and `gather_step_inputs`: the first programs take rows, the others tokens."""
    program = tl.program_id(0)
    num_row_programs = tl.cdiv(num_rows, BLOCK)
    if program < num_row_programs:
        row = program * BLOCK + tl.arange(0, BLOCK)
        is_row = row < num_rows
        slot = tl.load(idx_mapping_R + row, mask=is_row, other=0)
        num_computed = tl.load(num_computed_tokens_S + slot, mask=is_row, other=0)
        num_scheduled = tl.load(num_scheduled_R + row, mask=is_row, other=0)
        tl.store(seq_lens_R + row, (num_computed + num_scheduled).to(tl.int32), mask=is_row)
        if HAS_DRAFTS:
            is_req = row < num_reqs
            num_drafts = tl.load(num_drafts_R + row, mask=is_req, other=0)
            end = slot * row_length + tl.load(total_len_S + slot, mask=is_req, other=0)
            for number in range(max_drafts):
                is_draft = is_req & (num_drafts > number)
                draft = tl.load(draft_token_ids_SD + slot * draft_row_length + number, mask=is_draft, other=0)
                tl.store(all_token_ids_SL + end + number, tl.maximum(draft, 0), mask=is_draft)
    else:
        token = (program - num_row_programs) * BLOCK + tl.arange(0, BLOCK)
        is_token = token < num_tokens
        req = tl.load(token_to_req_T + token, mask=is_token, other=0)
        slot = tl.load(idx_mapping_R + req, mask=is_token, other=0)
        num_computed = tl.load(num_computed_tokens_S + slot, mask=is_token, other=0)
        position = num_computed + tl.load(token_offset_T + token, mask=is_token, other=0)
        tl.store(positions_T + token, position, mask=is_token)
        is_known = is_token
        if HAS_DRAFTS:
            # Another program may write the drafts' cells at this moment: they are read where they come from.
            is_req = is_token & (req < num_reqs)
            offset = position - tl.load(total_len_S + slot, mask=is_req, other=0)
            num_drafts = tl.load(num_drafts_R + req, mask=is_req, other=0)
            is_draft = is_req & (offset >= 0) & (offset < num_drafts)
            draft = tl.load(draft_token_ids_SD + slot * draft_row_length + offset, mask=is_draft, other=0)
            tl.store(input_ids_T + token, tl.maximum(draft, 0), mask=is_draft)
            is_known = is_token & (is_draft == 0)
        known = tl.load(all_token_ids_SL + slot * row_length + position, mask=is_known, other=0)
        tl.store(input_ids_T + token, known, mask=is_known)


@triton.jit(
    do_not_specialize=[
        "block_tables_SB",
        "table_width",
        "num_computed_tokens_S",
        "idx_mapping_R",
        "token_to_req_T",
        "token_offset_T",
        "block_tables_RB",
        "row_stride",
        "slot_mapping_T",
        "num_rows",
        "num_tokens",
        "num_actual_tokens",
        "num_columns",
    ]
)
def _gather_blocks(
    block_tables_SB,
    table_width,
    num_computed_tokens_S,
    idx_mapping_R,
    token_to_req_T,
    token_offset_T,
    block_tables_RB,
    row_stride,
    slot_mapping_T,
    num_rows,
    num_tokens,
    num_actual_tokens,
    num_columns,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Block table and slot mapping of one KV-cache group: a program per row, the others take tokens."""
    program = tl.program_id(0)
    if program < num_rows:
        row_slot = tl.load(idx_mapping_R + program)
        source = block_tables_SB + row_slot * table_width
        target = block_tables_RB + program.to(tl.int64) * row_stride
        for start in range(0, num_columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            is_column = column < num_columns
            tl.store(target + column, tl.load(source + column, mask=is_column, other=0), mask=is_column)
    else:
        token = (program - num_rows) * BLOCK + tl.arange(0, BLOCK)
        is_actual = token < num_actual_tokens
        req = tl.load(token_to_req_T + token, mask=is_actual, other=0)
        slot = tl.load(idx_mapping_R + req, mask=is_actual, other=0)
        num_computed = tl.load(num_computed_tokens_S + slot, mask=is_actual, other=0)
        position = num_computed + tl.load(token_offset_T + token, mask=is_actual, other=0)
        number = position // BLOCK_SIZE
        block_id = tl.load(block_tables_SB + slot * table_width + number, mask=is_actual, other=0).to(tl.int64)
        kv_slot = block_id * BLOCK_SIZE + (position - number * BLOCK_SIZE)
        tl.store(slot_mapping_T + token, tl.where(is_actual, kv_slot, _PAD_SLOT_ID), mask=token < num_tokens)


@triton.jit(
    do_not_specialize=[
        "sampled_token_ids_L",
        "sampled_stride",
        "failures_L",
        "failures_stride",
        "table_RX",
        "seq_lens_R",
        "prefill_len_S",
        "draft_token_ids_SD",
        "draft_row_length",
        "idx_mapping_R",
        "num_drafts_R",
        "num_checked_R",
        "first_row_R",
        "num_reqs",
        "max_drafts",
    ]
)
def _compute_outcome(
    sampled_token_ids_L,
    sampled_stride,
    failures_L,
    failures_stride,
    table_RX,
    seq_lens_R,
    prefill_len_S,
    draft_token_ids_SD,
    draft_row_length,
    idx_mapping_R,
    num_drafts_R,
    num_checked_R,
    first_row_R,
    num_reqs,
    max_drafts,
    HAS_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`verify_drafts`: the table of a `StepOutcome`."""
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_req = req < num_reqs
    slot = tl.load(idx_mapping_R + req, mask=is_req, other=0)
    length = tl.load(seq_lens_R + req, mask=is_req, other=0).to(tl.int64)
    prefill_len = tl.load(prefill_len_S + slot, mask=is_req, other=0)
    row = req.to(tl.int64)
    num_drafts = tl.zeros([BLOCK], dtype=tl.int64)
    accepted = tl.zeros([BLOCK], dtype=tl.int64)
    if HAS_DRAFTS:
        row = tl.load(first_row_R + req, mask=is_req, other=0)
        num_drafts = tl.load(num_drafts_R + req, mask=is_req, other=0)
        num_checked = tl.load(num_checked_R + req, mask=is_req, other=0)
        for number in range(max_drafts):
            # A rejected draft ends the request's row: then fewer are accepted than were looked at.
            goes_on = is_req & (accepted == number) & (num_checked > number)
            here = row + number
            token = tl.load(sampled_token_ids_L + here * sampled_stride, mask=goes_on, other=0)
            draft = tl.load(draft_token_ids_SD + slot * draft_row_length + number, mask=goes_on, other=0)
            failure = tl.load(failures_L + here * failures_stride, mask=goes_on, other=0)
            next_failure = tl.load(failures_L + (here + 1) * failures_stride, mask=goes_on, other=0)
            is_good = (failure.to(tl.int64) == 0) & (next_failure.to(tl.int64) == 0)
            is_accepted = goes_on & is_good & (token == draft.to(tl.int64))
            accepted += is_accepted.to(tl.int64)
    line = table_RX + req.to(tl.int64) * (max_drafts + 4)
    for column in range(max_drafts + 1):
        of_token = row + tl.minimum(accepted, column)
        token = tl.load(sampled_token_ids_L + of_token * sampled_stride, mask=is_req, other=0)
        tl.store(line + column, token, mask=is_req)
    num_sampled = tl.where(length - num_drafts >= prefill_len, accepted + 1, 0)
    failure = tl.load(failures_L + row * failures_stride, mask=is_req, other=0).to(tl.int64)
    tl.store(line + max_drafts + 1, num_sampled, mask=is_req)
    tl.store(line + max_drafts + 2, num_drafts - accepted, mask=is_req)
    tl.store(line + max_drafts + 3, failure, mask=is_req)


@triton.jit(
    do_not_specialize=[
        "table_RX",
        "all_token_ids_SL",
        "row_length",
        "total_len_S",
        "num_computed_tokens_S",
        "idx_mapping_R",
        "num_scheduled_R",
        "num_reqs",
        "max_drafts",
    ]
)
def _advance_state(
    table_RX,
    all_token_ids_SL,
    row_length,
    total_len_S,
    num_computed_tokens_S,
    idx_mapping_R,
    num_scheduled_R,
    num_reqs,
    max_drafts,
    BLOCK: tl.constexpr,
):
    """`advance_state`."""
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_req = req < num_reqs
    slot = tl.load(idx_mapping_R + req, mask=is_req, other=0)
    line = table_RX + req.to(tl.int64) * (max_drafts + 4)
    num_sampled = tl.load(line + max_drafts + 1, mask=is_req, other=0)
    num_rejected = tl.load(line + max_drafts + 2, mask=is_req, other=0)
    total_len = tl.load(total_len_S + slot, mask=is_req, other=0)
    num_computed = tl.load(num_computed_tokens_S + slot, mask=is_req, other=0)
    num_scheduled = tl.load(num_scheduled_R + req, mask=is_req, other=0)
    end = slot * row_length + total_len
    for column in range(max_drafts + 1):
        is_sampled = is_req & (num_sampled > column)
        token = tl.load(line + column, mask=is_sampled, other=0)
        tl.store(all_token_ids_SL + end + column, token.to(tl.int32), mask=is_sampled)
    tl.store(total_len_S + slot, total_len + num_sampled, mask=is_req)
    tl.store(num_computed_tokens_S + slot, num_computed + num_scheduled - num_rejected, mask=is_req)


class TritonStep(BoundStep):
    """Precomputes grids and arguments of all launches. All tensors but those of `outcome` are contiguous."""

    def __init__(self, state: SlotTensors, layout: LayoutTensors, buffers: StepTensors) -> None:
        self._buffers = buffers
        self._num_columns: tuple[int, ...] | None = None
        self._tensors: StepTensors
        num_rows, num_tokens = _padded_sizes(layout)
        self._sizes = num_rows, num_tokens
        self._table_shape = layout.num_reqs, layout.max_drafts + 4
        self._device = state.all_token_ids_SL.device
        token_programs = triton.cdiv(num_tokens, _BLOCK)
        req_programs = (triton.cdiv(layout.num_reqs, _BLOCK),)

        self._gather_tokens = _gather_tokens[(triton.cdiv(num_rows, _BLOCK) + token_programs,)]
        self._token_arguments = _token_arguments(state, layout, buffers)
        self._gather_blocks = _gather_blocks[(num_rows + token_programs,)]
        self._block_arguments = _block_arguments(state, layout, buffers)
        self._compute_outcome = _compute_outcome[req_programs]
        self._outcome_arguments = _outcome_arguments(state, layout, buffers)
        self._advance_state = _advance_state[req_programs]
        self._advance_arguments = _advance_arguments(state, layout)

    def gather(self, num_columns: tuple[int, ...]) -> StepTensors:
        if num_columns != self._num_columns:
            num_rows, num_tokens = self._sizes
            self._num_columns, self._tensors = num_columns, self._buffers.part(num_tokens, num_rows, num_columns)
        self._gather_tokens(*self._token_arguments)
        for (before, after), width in zip(self._block_arguments, num_columns, strict=True):
            self._gather_blocks(*before, width, *after)
        return self._tensors

    def outcome(self, sampled_token_ids_L: Tensor, failures_L: Tensor) -> tuple[StepOutcome, TokensOnHost | None]:
        # A new table each step: the copy to the host reads it while the next step runs.
        table_RX = torch.empty(self._table_shape, dtype=torch.int64, device=self._device)
        self._compute_outcome(
            sampled_token_ids_L,
            sampled_token_ids_L.stride(0),
            failures_L,
            failures_L.stride(0),
            table_RX,
            *self._outcome_arguments,
        )
        return StepOutcome(table_RX), None

    def advance(self, outcome: StepOutcome) -> None:
        self._advance_state(outcome.table_RX, *self._advance_arguments)


def _padded_sizes(layout: LayoutTensors) -> tuple[int, int]:
    """Numbers of rows and tokens, padding included."""
    return layout.idx_mapping_R.shape[0], layout.token_to_req_T.shape[0]


def _draft_counts(layout: LayoutTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Draft tokens of each request, those to verify, and its first logits row."""
    # Without drafts the kernels do not read their counts, and any tensor of their type will do.
    slots = layout.idx_mapping_R
    return (slots, slots, slots) if layout.drafts is None else layout.drafts[:3]


def _token_arguments(state: SlotTensors, layout: LayoutTensors, buffers: StepTensors) -> tuple[object, ...]:
    """Arguments of `_gather_tokens`."""
    num_rows, num_tokens = _padded_sizes(layout)
    return (
        state.all_token_ids_SL,
        state.all_token_ids_SL.shape[1],
        state.total_len_S,
        state.num_computed_tokens_S,
        state.draft_token_ids_SD,
        state.draft_token_ids_SD.shape[1],
        layout.idx_mapping_R,
        layout.num_scheduled_R,
        layout.token_to_req_T,
        layout.token_offset_T,
        _draft_counts(layout)[0],
        buffers.input_ids_T,
        buffers.positions_T,
        buffers.seq_lens_R,
        num_rows,
        layout.num_reqs,
        num_tokens,
        layout.max_drafts,
        layout.drafts is not None,
        _BLOCK,
    )


def _block_arguments(
    state: SlotTensors, layout: LayoutTensors, buffers: StepTensors
) -> list[tuple[tuple[object, ...], tuple[object, ...]]]:
    """Arguments of `_gather_blocks` per KV-cache group, before and after the number of columns."""
    num_rows, num_tokens = _padded_sizes(layout)
    groups = zip(
        state.block_tables_SB, state.block_sizes, buffers.block_tables_RB, buffers.slot_mappings_T, strict=True
    )
    return [
        (
            (
                all_blocks,
                all_blocks.shape[1],
                state.num_computed_tokens_S,
                layout.idx_mapping_R,
                layout.token_to_req_T,
                layout.token_offset_T,
                blocks,
                blocks.shape[1],
                slot_mapping,
                num_rows,
                num_tokens,
                layout.num_tokens,
            ),
            (block_size, _BLOCK),
        )
        for all_blocks, block_size, blocks, slot_mapping in groups
    ]


def _outcome_arguments(state: SlotTensors, layout: LayoutTensors, buffers: StepTensors) -> tuple[object, ...]:
    """Arguments of `_compute_outcome` after the sampled tokens, the failures and the table."""
    return (
        buffers.seq_lens_R,
        state.prefill_len_S,
        state.draft_token_ids_SD,
        state.draft_token_ids_SD.shape[1],
        layout.idx_mapping_R,
        *_draft_counts(layout),
        layout.num_reqs,
        layout.max_drafts,
        layout.drafts is not None,
        _BLOCK,
    )


def _advance_arguments(state: SlotTensors, layout: LayoutTensors) -> tuple[object, ...]:
    """Arguments of `_advance_state` after the table."""
    return (
        state.all_token_ids_SL,
        state.all_token_ids_SL.shape[1],
        state.total_len_S,
        state.num_computed_tokens_S,
        layout.idx_mapping_R,
        layout.num_scheduled_R,
        layout.num_reqs,
        layout.max_drafts,
        _BLOCK,
    )
