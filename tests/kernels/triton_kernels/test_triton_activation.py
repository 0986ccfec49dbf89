"""Gated activation functions in Triton against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import support.triton_interpreter  # noqa: F401 - repairs the interpreter
from penstock.kernels import activation as specification
from penstock.kernels.triton.activation import clamped_swiglu, gate_and_mul
from support.triton_device import DEVICE, needs_triton

pytestmark = needs_triton

REFERENCES = {
    "silu": specification.silu_and_mul_reference,
    "gelu": specification.gelu_and_mul_reference,
    "gelu_tanh": specification.gelu_tanh_and_mul_reference,
}


def _gate_up(num_tokens: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return (8 * torch.randn(num_tokens, 2 * size, generator=generator)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", REFERENCES)
@pytest.mark.parametrize("size", [1, 48, 1030])
def test_a_gated_activation(dtype: torch.dtype, activation: str, size: int) -> None:
    gate_up_TI = _gate_up(3, size, dtype)

    actual_TI = gate_and_mul(activation, gate_up_TI)

    expected_TI = REFERENCES[activation](gate_up_TI)
    assert actual_TI.dtype is dtype
    eps = torch.finfo(dtype).eps
    # Near 0 the functions differ by float32 roundings of 1 + erf.
    torch.testing.assert_close(actual_TI, expected_TI, rtol=4 * eps, atol=max(2e-5, eps / 8))
    # Not less precise than plain torch against float64.
    exact_TI = REFERENCES[activation](gate_up_TI.double())
    error, reference_error = (actual_TI - exact_TI).abs().max(), (expected_TI - exact_TI).abs().max()
    assert error <= 1.5 * reference_error + 1e-6


def test_rows_of_a_wider_tensor() -> None:
    gate_up_TI = _gate_up(4, 48, torch.bfloat16)[::2, 16:80]

    assert torch.equal(gate_and_mul("silu", gate_up_TI), gate_and_mul("silu", gate_up_TI.contiguous()))


def test_large_and_non_finite_gates() -> None:
    gate_T1 = torch.tensor([[-1e30], [-200.0], [0.0], [200.0], [1e30], [float("inf")], [float("nan")]], device=DEVICE)
    gate_up_TI = torch.cat([gate_T1, torch.ones_like(gate_T1)], dim=1)
    for activation, reference in REFERENCES.items():
        torch.testing.assert_close(gate_and_mul(activation, gate_up_TI), reference(gate_up_TI), equal_nan=True)


def test_the_functions_of_the_models_take_bfloat16() -> None:
    gate_up_TI = _gate_up(2, 32, torch.bfloat16)

    assert torch.equal(specification.silu_and_mul(gate_up_TI), gate_and_mul("silu", gate_up_TI))
    assert torch.equal(specification.gelu_and_mul(gate_up_TI), gate_and_mul("gelu", gate_up_TI))
    assert torch.equal(specification.gelu_tanh_and_mul(gate_up_TI), gate_and_mul("gelu_tanh", gate_up_TI))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_swiglu(dtype: torch.dtype) -> None:
    gate_up_TI = _gate_up(3, 40, dtype) * 3
    expected_TI = specification.ClampedSwiglu(1.702, 2.0).reference(gate_up_TI.float()).to(dtype)
    torch.testing.assert_close(clamped_swiglu(gate_up_TI, 1.702, 2.0), expected_TI)
