"""RMSNorm in Triton against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import support.triton_interpreter  # noqa: F401 - repairs the interpreter
from penstock.kernels import norm as specification
from penstock.kernels.triton.norm import rms_norm, takes
from support.triton_device import DEVICE, needs_triton

pytestmark = needs_triton

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def _assert_equal_up_to_a_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype is expected.dtype
    # One unit in the last place: float32 sums have another order.
    torch.testing.assert_close(actual, expected, rtol=4 * torch.finfo(expected.dtype).eps, atol=1e-6)
    assert (actual == expected).float().mean() > 0.98 or expected.dtype is torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 24, 128, 2050, 16384])
def test_rms_norm_of_rows(dtype: torch.dtype, size: int) -> None:
    x_TD, weight_D = _random(3, size + 8, dtype=dtype)[:, :size], _random(size, dtype=dtype)
    assert takes(x_TD, weight_D)

    _assert_equal_up_to_a_rounding(rms_norm(x_TD, weight_D, EPS), specification.rms_norm_reference(x_TD, weight_D, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "size"), [(1, 16), (5, 16), (3, 96), (40, 128)])
@pytest.mark.parametrize("weight_per_head", [True, False])
def test_rms_norm_of_heads(dtype: torch.dtype, num_heads: int, size: int, weight_per_head: bool) -> None:
    x_THD = _random(3, num_heads + 2, size, dtype=dtype)[:, :num_heads]
    weight = _random(num_heads, size, dtype=dtype) if weight_per_head else _random(size, dtype=dtype)
    assert takes(x_THD, weight)

    _assert_equal_up_to_a_rounding(rms_norm(x_THD, weight, EPS), specification.rms_norm_reference(x_THD, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_is_added_in_place(dtype: torch.dtype) -> None:
    x_TD, residual_TD = _random(3, 48, dtype=dtype), _random(3, 80, dtype=dtype)[:, 16:64]
    weight_D, kept_TD = _random(48, dtype=dtype), residual_TD.clone()
    sum_TD = x_TD + residual_TD

    normed_TD = rms_norm(x_TD, weight_D, EPS, residual=residual_TD)

    assert torch.equal(x_TD, sum_TD)
    assert torch.equal(residual_TD, kept_TD)
    _assert_equal_up_to_a_rounding(normed_TD, specification.rms_norm_reference(sum_TD, weight_D, EPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rounded_last(dtype: torch.dtype, offset: float) -> None:
    x_TD, residual_TD, weight_D = _random(3, 48, dtype=dtype), _random(4, 48, dtype=dtype)[1:], _random(48, dtype=dtype)
    expected_TD = specification.rms_norm_rounded_last_reference(x_TD, weight_D, EPS, offset)
    _assert_equal_up_to_a_rounding(specification.rms_norm_rounded_last(x_TD, weight_D, EPS, offset), expected_TD)
    sum_TD = x_TD + residual_TD
    expected_TD = specification.rms_norm_rounded_last_reference(sum_TD, weight_D, EPS, offset)

    normed_TD, new_TD = specification.add_rms_norm_rounded_last(x_TD, residual_TD, weight_D, EPS, offset)

    assert new_TD is x_TD
    assert torch.equal(new_TD, sum_TD)
    _assert_equal_up_to_a_rounding(normed_TD, expected_TD)


def test_a_row_does_not_depend_on_the_others() -> None:
    x_TD, weight_D = _random(5, 48, dtype=torch.bfloat16), _random(48, dtype=torch.bfloat16)

    assert torch.equal(rms_norm(x_TD, weight_D, EPS)[2:3], rms_norm(x_TD[2:3], weight_D, EPS))


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 48, device=DEVICE), torch.empty(48, device=DEVICE), EPS).shape == (0, 48)


def test_tensors_that_the_kernel_does_not_take() -> None:
    x_TD, weight_D = _random(16, 16, dtype=torch.bfloat16), _random(16, dtype=torch.bfloat16)

    assert not takes(x_TD.t(), weight_D)
    assert not takes(x_TD, weight_D[:1])
    assert not takes(x_TD, weight_D, x_TD.float())
    assert not takes(x_TD.double(), weight_D)
    assert torch.equal(
        specification.rms_norm(x_TD.t(), weight_D, EPS), specification.rms_norm_reference(x_TD.t(), weight_D, EPS)
    )
