"""Grammar masks and penalties in Triton against plain torch."""

from __future__ import annotations

import pytest
import torch

from support.triton_device import DEVICE, needs_triton

pytest.importorskip("triton", reason="Triton is not installed")

import support.triton_interpreter  # noqa: F401 - repairs the interpreter
from penstock.kernels.logits_shaping import IN_PROMPT, allow_by_bits_reference, penalise_reference
from penstock.kernels.triton.logits_shaping import allow_by_bits, count_tokens, penalise

pytestmark = needs_triton


@pytest.mark.parametrize("size", [1, 31, 64, 1100])
@pytest.mark.parametrize("rows", [None, [5, 0, 3], [6]])
def test_bits_allow_tokens(size: int, rows: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(size)
    logits_RV = torch.randn(7, size, generator=generator).to(DEVICE)
    logits_RV[5, 0] = float("nan")
    num_masked = 7 if rows is None else len(rows)
    words_NW = torch.randint(-(2**31), 2**31, (num_masked, -(-size // 32)), generator=generator).int().to(DEVICE)
    words_NW[0] = 0
    rows_N = None if rows is None else torch.tensor(rows, device=DEVICE)

    masked_RV = allow_by_bits(logits_RV.clone(), rows_N, words_NW)

    expected_RV = allow_by_bits_reference(logits_RV.clone(), rows_N, words_NW)
    torch.testing.assert_close(masked_RV, expected_RV, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 50, 2100])
@pytest.mark.parametrize("rows", [None, [5, 0, 3], [6]])
def test_penalties(size: int, rows: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(size)
    logits_RV = 3 * torch.randn(7, size, generator=generator)
    logits_RV[5, 0] = float("-inf")
    entries = torch.tensor([0, 0, 0, 1, 2, 700, IN_PROMPT, IN_PROMPT + 3], dtype=torch.int32)
    table_LV = entries[torch.randint(8, (9, size), generator=generator)]
    num_affected = 7 if rows is None else len(rows)
    lines_N, slots_N = (torch.randint(9, (num_affected,), generator=generator) for _ in range(2))
    penalties = [2 * torch.rand(9, generator=generator) + low for low in (0.2, -1.0, -1.0)]
    rows_N = torch.arange(7) if rows is None else torch.tensor(rows)
    arguments = [argument.to(DEVICE) for argument in (table_LV, lines_N, slots_N, *penalties)]

    penalised_RV = penalise(logits_RV.clone().to(DEVICE), None if rows is None else rows_N.to(DEVICE), *arguments)

    expected_RV = penalise_reference(
        logits_RV.clone(), rows_N, table_LV, lines_N, *(penalty[slots_N] for penalty in penalties)
    )
    torch.testing.assert_close(penalised_RV.cpu(), expected_RV, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_columns", [1, 4])
def test_sampled_tokens_are_counted(num_columns: int) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    table_SV = torch.randint(5, (9, 20), generator=generator, dtype=torch.int32) + IN_PROMPT
    slots_R = torch.tensor([3, 8, 0, 5])
    # Columns of a step's outcome; rows with the same token several times.
    outcome_RX = torch.randint(2, (4, num_columns + 3), generator=generator)
    outcome_RX[:, -3] = torch.tensor([num_columns, 0, 1, num_columns])
    tokens_RX, num_tokens_R = outcome_RX.to(DEVICE)[:, :-3], outcome_RX.to(DEVICE)[:, -3]
    counted_SV = table_SV.clone().to(DEVICE)

    count_tokens(counted_SV, slots_R.to(DEVICE), tokens_RX, num_tokens_R)

    for slot, row in zip(slots_R.tolist(), outcome_RX.tolist(), strict=True):
        for token in row[: row[-3]]:
            table_SV[slot, token] += 1
    assert torch.equal(counted_SV.cpu(), table_SV)
