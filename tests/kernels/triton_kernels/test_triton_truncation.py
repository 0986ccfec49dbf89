"""Temperature, min-p, top-k and top-p in Triton against plain torch and numpy."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.triton_device import DEVICE, needs_triton

pytest.importorskip("triton", reason="Triton is not installed")

import support.triton_interpreter  # noqa: F401 - repairs the interpreter
from penstock.kernels import sampling as specification
from penstock.kernels.triton import truncation

pytestmark = needs_triton

NAN, INF = float("nan"), float("inf")
SLOTS = [5, 2, 7, 0, 3, 6]


def _by_slot(values: list[float], dtype: torch.dtype) -> Tensor:
    of_slots = torch.full((8,), 3, dtype=dtype)
    of_slots[SLOTS[: len(values)]] = torch.tensor(values, dtype=dtype)
    return of_slots.to(DEVICE)


def _slots(num_rows: int) -> Tensor:
    return torch.tensor(SLOTS[:num_rows], device=DEVICE)


def _mask_top_k_top_p(logits_RV: Tensor, top_k: list[int], top_p: list[float]) -> Tensor:
    top_k_S, top_p_S = _by_slot([*top_k], torch.int64), _by_slot(top_p, torch.float32)
    return truncation.mask_top_k_top_p(logits_RV.clone(), top_k_S, top_p_S, _slots(len(logits_RV)))


def _shapes_of_distributions(size: int) -> Tensor:
    """Sharp, usual, wide and flat ones, ties, and a row with few tokens."""
    generator = torch.Generator().manual_seed(size)
    logits_RV = torch.randn(6, size, generator=generator)
    logits_RV *= torch.tensor([30.0, 3.0, 8.0, 1e-3, 2.0, 2.0]).unsqueeze(-1)
    logits_RV[2] -= 100.0
    logits_RV[4] = (logits_RV[4] * 2).round() / 2
    logits_RV[5, torch.rand(size, generator=generator) < 0.9] = -INF
    logits_RV[5, 0] = 0.0
    return logits_RV


def _check_kept(logits_RV: Tensor, masked_RV: Tensor, top_k: list[int], top_p: list[float]) -> None:
    """The tokens before which less than top_p lies; either way where it is top_p within 1e-5."""
    for logits, masked, k, p in zip(logits_RV.double().numpy(), masked_RV.cpu().numpy(), top_k, top_p, strict=True):
        is_kept = np.isfinite(masked)
        assert np.array_equal(masked[is_kept], logits[is_kept].astype(np.float32))
        ordered = np.sort(logits)[::-1]
        is_of_k = (logits >= ordered[k - 1]) & np.isfinite(logits)
        mass = np.where(is_of_k, np.exp(logits - ordered[0]), 0.0)
        larger = np.sort(mass)[::-1].cumsum()
        rank = np.searchsorted(-ordered, -logits)
        mass_before = np.where(rank > 0, larger[rank - 1], 0.0) / mass.sum()
        is_expected = is_of_k & (mass_before < p) if p < 1.0 else is_of_k
        is_close = is_of_k & (np.abs(mass_before - p) < 1e-5)
        assert ((is_kept == is_expected) | is_close).all()
        # Ties are kept together.
        assert not is_kept.any() or is_kept.sum() == (logits >= logits[is_kept].min()).sum()


@pytest.fixture(params=["large blocks", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks: several for a row and for its candidates, and fewer lanes than top_k."""
    if request.param == "small blocks":
        monkeypatch.setattr(truncation, "_TOKENS_AT_ONCE", 256)
        monkeypatch.setattr(truncation, "_TOKENS_LISTED", 256)
        monkeypatch.setattr(truncation, "_CANDIDATES_AT_ONCE", 256)


@pytest.mark.parametrize("size", [7, 1001])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 1e-6])
@pytest.mark.usefixtures("blocks")
def test_top_p(size: int, top_p: float) -> None:
    logits_RV = _shapes_of_distributions(size)

    masked_RV = _mask_top_k_top_p(logits_RV.to(DEVICE), [size] * 6, [top_p] * 6)

    _check_kept(logits_RV, masked_RV, [size] * 6, [top_p] * 6)
    if top_p == 1.0:
        assert torch.equal(masked_RV.cpu(), logits_RV)


@pytest.mark.parametrize(("size", "top_k"), [(7, 1), (7, 6), (300, 20), (1001, 50), (1001, 400), (1001, 1000)])
@pytest.mark.usefixtures("blocks")
def test_top_k(size: int, top_k: int) -> None:
    logits_RV = _shapes_of_distributions(size)

    masked_RV = _mask_top_k_top_p(logits_RV.to(DEVICE), [top_k] * 6, [1.0] * 6)

    expected_RV = specification.mask_top_k_top_p_reference(logits_RV, torch.tensor([top_k] * 6), torch.ones(6))
    assert torch.equal(masked_RV.cpu(), expected_RV)


@pytest.mark.parametrize(("top_k", "top_p"), [(50, 0.9), (400, 0.5), (3, 0.99), (999, 0.95)])
@pytest.mark.usefixtures("blocks")
def test_top_p_counts_the_probability_of_the_top_k(top_k: int, top_p: float) -> None:
    logits_RV = _shapes_of_distributions(1001)

    masked_RV = _mask_top_k_top_p(logits_RV.to(DEVICE), [top_k] * 6, [top_p] * 6)

    _check_kept(logits_RV, masked_RV, [top_k] * 6, [top_p] * 6)


def test_each_row_has_the_parameters_of_its_slot() -> None:
    logits_RV = _shapes_of_distributions(300)
    top_k, top_p = [300, 1, 30, 300, 5, 300], [0.9, 1.0, 0.8, 1.0, 0.2, 0.6]

    masked_RV = _mask_top_k_top_p(logits_RV.to(DEVICE), top_k, top_p)

    _check_kept(logits_RV, masked_RV, top_k, top_p)
    assert torch.equal(masked_RV[3].cpu(), logits_RV[3])


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_top_p_keeps_no_token_beyond_the_one_that_reaches_the_mass(top_p: float, num_kept: int) -> None:
    # So close that each has exactly a quarter, and still no two tie.
    logits_RV = torch.tensor([[1e-9, 3e-9, 0.0, 2e-9]], device=DEVICE)

    assert _mask_top_k_top_p(logits_RV, [4], [top_p]).isfinite().sum() == num_kept


def test_a_row_does_not_depend_on_the_others() -> None:
    logits_RV = _shapes_of_distributions(1001).to(DEVICE)

    masked_RV = _mask_top_k_top_p(logits_RV, [1001] * 6, [0.9] * 6)

    for row in range(6):
        assert torch.equal(_mask_top_k_top_p(logits_RV[row : row + 1], [1001], [0.9]), masked_RV[row : row + 1])


def _rows_without_a_distribution() -> Tensor:
    rows = [
        [1.0, NAN, 2.0, 0.0],
        [1.0, INF, 2.0, INF],
        [-INF, -INF, -INF, -INF],
        [-INF, -3.0, -INF, -INF],
        [NAN, INF, NAN, -INF],
        [-0.0, 0.0, -INF, -1.0],
    ]
    return torch.tensor(rows).repeat_interleave(80, dim=1)


@pytest.mark.parametrize("top_k", [1, 2, 100, 200, 320])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.usefixtures("blocks")
def test_rows_without_a_distribution_are_left_as_by_the_specification(top_k: int, top_p: float) -> None:
    logits_RV = _rows_without_a_distribution()

    masked_RV = _mask_top_k_top_p(logits_RV.to(DEVICE), [top_k] * 6, [top_p] * 6)

    expected_RV = specification.mask_top_k_top_p_reference(
        logits_RV, torch.tensor([top_k] * 6), torch.tensor([top_p] * 6)
    )
    torch.testing.assert_close(masked_RV.cpu(), expected_RV, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 300, 1001])
def test_min_p(size: int) -> None:
    logits_RV, min_p = _shapes_of_distributions(size), [0.0, 0.1, 1e-4, 1.0, 0.5, 0.02]

    masked_RV = truncation.mask_min_p(logits_RV.to(DEVICE), _by_slot(min_p, torch.float32), _slots(6)).cpu()

    for logits, masked, part in zip(_shapes_of_distributions(size).double(), masked_RV, min_p, strict=True):
        ratio = (logits - logits.max()).exp()
        is_close = (ratio - part).abs() < 1e-6 * max(part, 1e-4)
        assert ((masked.isfinite() == (ratio >= part) & logits.isfinite()) | is_close).all()
        assert torch.equal(masked[masked.isfinite()], logits[masked.isfinite()].float())


@pytest.mark.parametrize("min_p", [0.0, 0.3, 1.0])
def test_min_p_of_rows_without_a_distribution(min_p: float) -> None:
    logits_RV = _rows_without_a_distribution()

    masked_RV = truncation.mask_min_p(logits_RV.to(DEVICE), _by_slot([min_p] * 6, torch.float32), _slots(6))

    expected_RV = specification.mask_min_p_reference(_rows_without_a_distribution(), torch.full((6,), min_p))
    torch.testing.assert_close(masked_RV.cpu(), expected_RV, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 300, 5000])
def test_temperature_divides_like_torch(size: int) -> None:
    logits_RV, temperature = _shapes_of_distributions(size), [1.0, 0.7, 1.3, 0.01, 2.0, 0.9]

    divided_RV = truncation.apply_temperature(
        logits_RV.to(DEVICE), _by_slot(temperature, torch.float32), _slots(6)
    ).cpu()

    assert torch.equal(divided_RV, _shapes_of_distributions(size) / torch.tensor(temperature).unsqueeze(-1))


def test_rows_of_a_wider_tensor() -> None:
    wide_RV = _shapes_of_distributions(400).to(DEVICE)
    logits_RV = wide_RV[1:4, 8:308]
    before_RV = wide_RV.clone()
    top_k_S, top_p_S = _by_slot([300] * 3, torch.int64), _by_slot([0.9] * 3, torch.float32)

    truncation.mask_top_k_top_p(logits_RV, top_k_S, top_p_S, _slots(3))

    _check_kept(before_RV[1:4, 8:308].cpu(), logits_RV, [300] * 3, [0.9] * 3)
    wide_RV[1:4, 8:308] = before_RV[1:4, 8:308]
    assert torch.equal(wide_RV, before_RV)


def test_the_sampler_calls_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("apply_temperature", "mask_min_p", "mask_top_k_top_p"):
        monkeypatch.setattr(truncation, name, lambda *arguments, name=name: called.append(name))
    logits_RV, parameter_S = torch.zeros(1, 5, device=DEVICE), torch.ones(8, device=DEVICE)

    specification.apply_temperature(logits_RV, parameter_S, _slots(1))
    specification.mask_min_p(logits_RV, parameter_S, _slots(1))
    specification.mask_top_k_top_p(logits_RV, parameter_S.long(), parameter_S, _slots(1))

    assert called == ["apply_temperature", "mask_min_p", "mask_top_k_top_p"]


_COMPILED = """
import sys
import pytest, torch
sys.path[:0] = {paths!r}
from support.triton_compile import compile_only
from penstock.kernels.triton import truncation
counts = compile_only(pytest.MonkeyPatch())
parameter_S = torch.ones(257)
for num_rows in (1, 64):
    logits_RV = torch.empty(64, 151936)[:num_rows]
    for slots_R in (torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_rows + 1, dtype=torch.int64)[1:]):
        truncation.apply_temperature(logits_RV, parameter_S, slots_R)
        truncation.mask_min_p(logits_RV, parameter_S, slots_R)
        truncation.mask_top_k_top_p(logits_RV, parameter_S.long(), parameter_S, slots_R)
print(counts)
"""


def test_the_kernels_compile_once_for_a_vocabulary_on_an_h100() -> None:
    """In a process without the interpreter; no GPU is needed."""
    script = _COMPILED.format(paths=[str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ast.literal_eval(done.stdout) == {"_divide_row": 1, "_mask_min_p": 1, "_mask_top_k_top_p": 1}
