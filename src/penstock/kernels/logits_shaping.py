"""Logits transforms: bias, masks and penalties. Rows are independent.

Suffixes: R logits rows, V vocabulary, E entries (a token of a row each), S slots, L positions, P prefix tokens,
N affected rows of the step.
Logits are float32, contiguous, and changed in place.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.native import NATIVE
from penstock.kernels.triton import triton_runs

_NEG_INF = float("-inf")
# Occurrences of a token in one int32: one bit for the prompt, the rest counts the output.
IN_PROMPT = 1 << 30
OUTPUT_COUNT = IN_PROMPT - 1


def add_to_tokens(logits_RV: Tensor, row_of_E: Tensor, token_E: Tensor, value_E: Tensor) -> Tensor:
    """Add float32 values to logits of single tokens; several entries may name the same token."""
    logits_RV.view(-1).index_add_(0, row_of_E * logits_RV.shape[1] + token_E, value_E)
    return logits_RV


def forbid_tokens(logits_RV: Tensor, row_of_E: Tensor, token_E: Tensor, is_forbidden_E: Tensor) -> Tensor:
    """Set forbidden tokens to minus infinity; their number need not be known to the host."""
    flat_E = row_of_E * logits_RV.shape[1] + token_E
    # Several entries may name one token, so each takes the minimum.
    ceiling_E = torch.where(is_forbidden_E, _NEG_INF, float("inf"))
    logits_RV.view(-1).scatter_reduce_(0, flat_E, ceiling_E, "amin")
    return logits_RV


def keep_tokens(logits_RV: Tensor, rows: Tensor, row_of_E: Tensor, token_E: Tensor) -> Tensor:
    """Set all tokens of `rows` to minus infinity, except those that have an entry."""
    flat_E = row_of_E * logits_RV.shape[1] + token_E
    kept_E = logits_RV.view(-1).index_select(0, flat_E)
    logits_RV.index_fill_(0, rows, _NEG_INF)
    logits_RV.view(-1).index_copy_(0, flat_E, kept_E)
    return logits_RV


def allow_by_bits_reference(logits_RV: Tensor, rows_N: Tensor | None, words_NW: Tensor) -> Tensor:
    """Set all tokens without a set bit to minus infinity, in these rows.

    rows_N: int64, distinct; None where the bitmask has a row for each row of the logits. words_NW: int32; bit i of word
    w is token 32 w + i.
    """
    bits_NW32 = (words_NW.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words_NW.device)) & 1
    is_forbidden_NV = bits_NW32.view(len(words_NW), -1)[:, : logits_RV.shape[1]] == 0
    for number, row in enumerate(range(len(logits_RV)) if rows_N is None else rows_N.tolist()):
        logits_RV[row].masked_fill_(is_forbidden_NV[number], _NEG_INF)
    return logits_RV


def allow_by_bits(logits_RV: Tensor, rows_N: Tensor | None, words_NW: Tensor) -> Tensor:
    """Apply a bitmask like `allow_by_bits_reference`, faster. rows_N and words_NW are contiguous.

    Without the C++ and Triton kernels NaN stays NaN even where the token is masked.
    """
    if NATIVE is not None and NATIVE.runs(logits_RV):
        return NATIVE.allow_by_bits(logits_RV, rows_N, words_NW)
    if triton_runs(logits_RV):
        from penstock.kernels.triton.logits_shaping import allow_by_bits as allow_in_triton

        return allow_in_triton(logits_RV, rows_N, words_NW)
    return allow_by_bytes(logits_RV, rows_N, words_NW)


def allow_by_bytes(logits_RV: Tensor, rows_N: Tensor | None, words_NW: Tensor) -> Tensor:
    """`allow_by_bits` in torch, eight tokens at a time."""
    bytes_NB = words_NW.view(torch.uint8).int()
    penalties = _penalties_by_byte(logits_RV.device)
    added_NV = penalties.index_select(0, bytes_NB.view(-1)).view(len(words_NW), -1)[:, : logits_RV.shape[1]]
    return logits_RV.add_(added_NV) if rows_N is None else logits_RV.index_add_(0, rows_N, added_NV)


@functools.cache
def _penalties_by_byte(device: torch.device) -> Tensor:
    """Additive mask of eight tokens for each value of a byte, float32 [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits, np.float32(0), np.float32(_NEG_INF))).to(device)


def ends_with_prefix(
    token_ids_SL: Tensor, slot_E: Tensor, length_E: Tensor, begin_E: Tensor, prefix_EP: Tensor
) -> Tensor:
    """Whether the tokens from `begin` on, of a sequence of `length`, end with the entry's prefix: bool [E].

    token_ids_SL: int32. slot_E, length_E, begin_E: int64. prefix_EP: int64, right-aligned, padded with -1.
    """
    num_prefix = prefix_EP.shape[1]
    position_EP = length_E.unsqueeze(-1) + torch.arange(-num_prefix, 0, device=prefix_EP.device)
    is_inside_EP = position_EP >= begin_E.unsqueeze(-1)
    flat_EP = slot_E.unsqueeze(-1) * token_ids_SL.shape[1] + position_EP.clamp(min=0)
    token_EP = token_ids_SL.view(-1).index_select(0, flat_EP.view(-1)).view(flat_EP.shape)
    return ((prefix_EP < 0) | (is_inside_EP & (token_EP == prefix_EP))).all(dim=-1)


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
    """Apply each slot's penalties like `penalise_reference`. L: lines of the table of occurrences.

    rows_N: int64; None where N are all rows in their order. lines_N, slots_N: int64, line of the table and slot of each
    row. repetition_S, frequency_S, presence_S: float32, contiguous.
    """
    if triton_runs(logits_RV):
        from penstock.kernels.triton.logits_shaping import penalise as penalise_in_triton

        return penalise_in_triton(logits_RV, rows_N, table_LV, lines_N, slots_N, repetition_S, frequency_S, presence_S)
    if rows_N is None:
        rows_N = torch.arange(len(logits_RV), device=logits_RV.device)
    function = _penalise_cpu if logits_RV.device.type == "cpu" else penalise_reference
    of_rows = (penalty_S.index_select(0, slots_N) for penalty_S in (repetition_S, frequency_S, presence_S))
    return function(logits_RV, rows_N, table_LV, lines_N, *of_rows)


def penalise_reference(
    logits_RV: Tensor,
    rows_N: Tensor,
    table_SV: Tensor,
    slots_N: Tensor,
    repetition_N: Tensor,
    frequency_N: Tensor,
    presence_N: Tensor,
) -> Tensor:
    """Apply repetition, frequency and presence penalties to N of the rows.

    rows_N: int64, row indices. slots_N: int64, their rows of the table.
    table_SV: int32, IN_PROMPT if the prompt has the token, plus its count in the output.
    repetition_N, frequency_N, presence_N: float32, the requests' penalties.
    Repetition: Keskar et al., "CTRL", 2019, over prompt and output. Frequency and presence: the OpenAI API's, over
    the output.
    """
    before_NV = logits_RV.index_select(0, rows_N)
    occurrences_NV = table_SV.index_select(0, slots_N)
    repetition_N1 = repetition_N.unsqueeze(-1)
    scaled_NV = torch.where(before_NV > 0, before_NV / repetition_N1, before_NV * repetition_N1)
    after_NV = torch.where(occurrences_NV != 0, scaled_NV, before_NV)
    count_NV = (occurrences_NV & OUTPUT_COUNT).to(torch.float32)
    after_NV -= frequency_N.unsqueeze(-1) * count_NV
    after_NV -= presence_N.unsqueeze(-1) * (count_NV > 0)
    return logits_RV.index_copy_(0, rows_N, after_NV)


def _penalise_cpu(
    logits_RV: Tensor,
    rows_N: Tensor,
    table_SV: Tensor,
    slots_N: Tensor,
    repetition_N: Tensor,
    frequency_N: Tensor,
    presence_N: Tensor,
) -> Tensor:
    """Update tokens that have occurred only: a seventh of the time at 32 rows of 32,000."""
    logits, table = logits_RV.numpy(), table_SV.numpy()
    penalties = zip(repetition_N.numpy(), frequency_N.numpy(), presence_N.numpy(), strict=True)
    for row, slot, (repetition, frequency, presence) in zip(rows_N.tolist(), slots_N.tolist(), penalties, strict=True):
        occurrences = table[slot]
        token_ids = np.flatnonzero(occurrences != 0)
        before = logits[row, token_ids]
        count = (occurrences[token_ids] & OUTPUT_COUNT).astype(np.float32)
        after = np.where(before > 0, before / repetition, before * repetition)
        after -= frequency * count
        after -= presence * (count > 0)
        logits[row, token_ids] = after
    return logits_RV


def count_tokens(table_SV: Tensor, slots_R: Tensor, tokens_RX: Tensor, num_tokens_R: Tensor) -> None:
    """Add the first num_tokens of each row's tokens to the occurrences of its slot, in place.

    table_SV: int32. slots_R: int64, distinct. tokens_RX, num_tokens_R: int64; the others are any tokens of the
    vocabulary.
    """
    if triton_runs(table_SV):
        from penstock.kernels.triton.logits_shaping import count_tokens as count_in_triton

        count_in_triton(table_SV, slots_R, tokens_RX, num_tokens_R)
        return
    for number, token_R in enumerate(tokens_RX.unbind(1)):
        is_counted_R = num_tokens_R > number
        table_SV.view(-1).index_add_(0, slots_R * table_SV.shape[1] + token_R, is_counted_R.to(torch.int32))
