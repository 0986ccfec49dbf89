"""Grammar masks and penalties in Triton.

Suffixes: R logits rows or requests, V vocabulary, N affected rows, W words of 32 tokens, S slots, L lines of a table,
X columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_REQUESTS_AT_ONCE = 128
# As in `kernels.logits_shaping`.
_OUTPUT_COUNT = tl.constexpr((1 << 30) - 1)


def allow_by_bits(logits_RV: Tensor, rows_N: Tensor | None, words_NW: Tensor) -> Tensor:
    """`kernels.logits_shaping.allow_by_bits_reference`, in place; all are contiguous."""
    num_rows, num_words = words_NW.shape
    size = min(logits_RV.shape[1], 32 * num_words)
    _forbid_without_bit[(num_rows, triton.cdiv(size, _BLOCK))](
        logits_RV,
        words_NW if rows_N is None else rows_N,
        words_NW,
        logits_RV.stride(0),
        num_words,
        size,
        ALL_ROWS=rows_N is None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return logits_RV


def penalise(
    logits_RV: Tensor,
    rows_N: Tensor | None,
    table_LV: Tensor,
    lines_N: Tensor,
    slots_N: Tensor,
    repetition_S: Tensor,
    frequency_S: Tensor,
    presence_S: Tensor,
) -> Tensor:
    """`kernels.logits_shaping.penalise`, in place; rows of logits and table are contiguous, vectors too."""
    size = logits_RV.shape[1]
    _penalise[(len(slots_N), triton.cdiv(size, _BLOCK))](
        logits_RV,
        slots_N if rows_N is None else rows_N,
        table_LV,
        lines_N,
        slots_N,
        repetition_S,
        frequency_S,
        presence_S,
        logits_RV.stride(0),
        table_LV.stride(0),
        size,
        ALL_ROWS=rows_N is None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return logits_RV


def count_tokens(table_SV: Tensor, slots_R: Tensor, tokens_RX: Tensor, num_tokens_R: Tensor) -> None:
    """`kernels.logits_shaping.count_tokens`, in place."""
    num_rows, num_columns = tokens_RX.shape
    _count_tokens[(triton.cdiv(num_rows, _REQUESTS_AT_ONCE),)](
        table_SV,
        slots_R,
        tokens_RX,
        num_tokens_R,
        table_SV.stride(0),
        *tokens_RX.stride(),
        num_tokens_R.stride(0),
        num_rows,
        num_columns,
        BLOCK=_REQUESTS_AT_ONCE,
        num_warps=4,
    )


@triton.jit
def _forbid_without_bit(
    logits_ptr, rows_ptr, words_ptr, row_stride, num_words, size, ALL_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < size
    row = number if ALL_ROWS else tl.load(rows_ptr + number)
    word = tl.load(words_ptr + number * num_words + token // 32, mask=mask, other=0)
    is_forbidden = ((word >> (token % 32)) & 1) == 0
    forbidden = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(logits_ptr + row * row_stride + token, forbidden, mask=mask & is_forbidden)


@triton.jit(do_not_specialize=["rows_ptr", "lines_ptr", "slots_ptr"])
def _penalise(
    logits_ptr,
    rows_ptr,
    table_ptr,
    lines_ptr,
    slots_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    row_stride,
    line_stride,
    size,
    ALL_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = number if ALL_ROWS else tl.load(rows_ptr + number)
    slot = tl.load(slots_ptr + number)
    repetition = tl.load(repetition_ptr + slot) + tl.zeros((BLOCK,), tl.float32)
    frequency = tl.load(frequency_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    line_ptr = table_ptr + tl.load(lines_ptr + number) * line_stride
    occurrences = tl.load(line_ptr + token, mask=token < size, other=0)
    # Tokens that have not occurred keep their logits.
    mask = occurrences != 0
    logit = tl.load(logits_ptr + row * row_stride + token, mask=mask, other=0.0)
    scaled = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
    count = (occurrences & _OUTPUT_COUNT).to(tl.float32)
    penalised = scaled - frequency * count - tl.where(count > 0.0, presence, 0.0)
    tl.store(logits_ptr + row * row_stride + token, penalised, mask=mask)


@triton.jit(
    do_not_specialize=[
        "slots_ptr",
        "tokens_ptr",
        "num_tokens_ptr",
        "token_stride",
        "column_stride",
        "num_stride",
        "num_rows",
        "num_columns",
    ]
)
def _count_tokens(
    table_ptr,
    slots_ptr,
    tokens_ptr,
    num_tokens_ptr,
    line_stride,
    token_stride,
    column_stride,
    num_stride,
    num_rows,
    num_columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    slot = tl.load(slots_ptr + row, mask=is_row, other=0)
    num_tokens = tl.load(num_tokens_ptr + row * num_stride, mask=is_row, other=0)
    for column in range(num_columns):
        is_counted = is_row & (column < num_tokens)
        token = tl.load(tokens_ptr + row * token_stride + column * column_stride, mask=is_counted, other=0)
        cell_ptr = table_ptr + slot * line_stride + token
        count = tl.load(cell_ptr, mask=is_counted, other=0)
        tl.store(cell_ptr, count + 1, mask=is_counted)
