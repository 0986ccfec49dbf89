"""Norm, rotary and activation kernels against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from penstock.kernels.activation import silu_and_mul
from penstock.kernels.norm import add_rms_norm, rms_norm
from penstock.kernels.rotary import apply_rotary, gather_rotation, rotary_table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_rms_norm_equals_transformers(num_tokens: int, dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(48, eps=1e-2)
    norm.weight.data.normal_()
    norm = norm.to(dtype)
    x_TD = torch.randn(num_tokens, 48, dtype=dtype)
    torch.testing.assert_close(rms_norm(x_TD, norm.weight.detach(), 1e-2), norm(x_TD).detach(), rtol=1e-6, atol=1e-6)


def test_rms_norm_takes_a_weight_of_its_own_for_every_head() -> None:
    x_THD, weight_HD = torch.randn(5, 3, 8), torch.randn(3, 8)
    joint = rms_norm(x_THD, weight_HD, 1e-5)
    for head in range(3):
        torch.testing.assert_close(joint[:, head], rms_norm(x_THD[:, head], weight_HD[head], 1e-5))


def test_low_precision_statistics_are_those_of_float32() -> None:
    # Squares of 300 overflow float16, and their sum loses bfloat16's few digits.
    x_TD = torch.full((1, 64), 300.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x_TD, torch.ones(64, dtype=torch.float16), 1e-6), torch.ones_like(x_TD))


def test_add_rms_norm_adds_first_and_leaves_the_residual_alone() -> None:
    x_TD, residual_TD, weight_D = torch.randn(4, 16), torch.randn(4, 16), torch.randn(16)
    total_TD, before = x_TD + residual_TD, residual_TD.clone()
    normed_TD, new_residual_TD = add_rms_norm(x_TD, residual_TD, weight_D, 1e-5)
    assert torch.equal(new_residual_TD, total_TD)
    assert torch.equal(residual_TD, before)
    torch.testing.assert_close(normed_TD, F.rms_norm(total_TD, (16,), weight_D, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    gate_TI, up_TI = torch.randn(7, 24, dtype=dtype), torch.randn(7, 24, dtype=dtype)
    before = torch.cat((gate_TI, up_TI), -1)
    torch.testing.assert_close(silu_and_mul(before), F.silu(gate_TI) * up_TI)


@given(
    num_tokens=st.integers(1, 9),
    num_heads=st.integers(1, 5),
    half=st.integers(1, 20),
    unturned=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
)
@settings(deadline=None)
def test_rotary_turns_the_first_dimensions_and_nothing_else(
    num_tokens: int, num_heads: int, half: int, unturned: int, dtype: torch.dtype
) -> None:
    inv_freq = torch.rand(half)
    table = rotary_table(inv_freq, 50, attention_scaling=1.25)
    positions_T = torch.randint(50, (num_tokens,))
    buffer = torch.randn(num_tokens, num_heads + 2, 2 * half + unturned, dtype=dtype)
    before = buffer.clone()

    apply_rotary(buffer[:, :num_heads], gather_rotation(table, positions_T, dtype))

    angles = (positions_T[:, None].float() * inv_freq).repeat(1, 2)
    cos, sin = (angles.cos() * 1.25).to(dtype), (angles.sin() * 1.25).to(dtype)
    turned = before[:, :num_heads, : 2 * half]
    expected, _ = apply_rotary_pos_emb(turned, turned, cos, sin, unsqueeze_dim=1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(buffer[:, :num_heads, : 2 * half], expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(buffer[:, num_heads:], before[:, num_heads:])
    assert torch.equal(buffer[..., 2 * half :], before[..., 2 * half :])


def test_positions_may_be_int32() -> None:
    table = rotary_table(torch.rand(4), 10, attention_scaling=1.0)
    heads = torch.randn(2, 3, 8)
    expected = heads.clone()
    apply_rotary(expected, gather_rotation(table, torch.tensor([3, 9]), torch.float32))
    apply_rotary(heads, gather_rotation(table, torch.tensor([3, 9], dtype=torch.int32), torch.float32))
    assert torch.equal(heads, expected)
