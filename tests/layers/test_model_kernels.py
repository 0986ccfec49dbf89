"""Norm, rotary and activation kernels against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm, Gemma2TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from penstock.attention import NO_CONTEXT
from penstock.kernels.activation import ACTIVATIONS, GATED_ACTIVATIONS
from penstock.kernels.norm import add_rms_norm, rms_norm, rms_norm_rounded_last
from penstock.kernels.rotary import apply_rotary, gather_rotation, rotary_table
from penstock.layers.embedding import ScaledVocabEmbedding
from penstock.layers.norm import LayerNorm, RMSNormRoundedLast, WholeQueryKeyNorm
from penstock.parallel import ParallelState

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
@pytest.mark.parametrize("name", GATED_ACTIVATIONS)
def test_gated_activations_equal_transformers(name: str, dtype: torch.dtype) -> None:
    gate_TI, up_TI = torch.randn(7, 24, dtype=dtype), torch.randn(7, 24, dtype=dtype)
    before = torch.cat((gate_TI, up_TI), -1)
    # Two roundings of values up to 16, in float32.
    tolerance = 4e-6 if dtype == torch.float32 else 0.02
    expected = ACT2FN[name](gate_TI) * up_TI
    torch.testing.assert_close(GATED_ACTIVATIONS[name](before), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_transformers(name: str) -> None:
    x_TI = 3 * torch.randn(7, 24)
    # 1 + erf(x) loses the digits of an erf near -1, whose roundings are multiplied by x, up to about 12.
    torch.testing.assert_close(ACTIVATIONS[name](x_TI), ACT2FN[name](x_TI), rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("norm_class", "weight_offset"), [(Gemma2RMSNorm, 1.0), (Olmo2RMSNorm, 0.0)])
def test_rms_norm_rounded_last_equals_transformers(
    norm_class: type[nn.Module], weight_offset: float, dtype: torch.dtype
) -> None:
    norm = norm_class(48, eps=1e-2)
    norm.weight.data.normal_()
    norm = norm.to(dtype)
    x_TD = 5 * torch.randn(33, 48, dtype=dtype)
    actual = rms_norm_rounded_last(x_TD, norm.weight.detach(), 1e-2, weight_offset)
    torch.testing.assert_close(actual, norm(x_TD).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_class", [RMSNormRoundedLast, LayerNorm])
def test_norms_add_first_and_leave_the_residual_alone(
    norm_class: type[RMSNormRoundedLast] | type[LayerNorm], dtype: torch.dtype
) -> None:
    norm = norm_class(16, 1e-5).to(dtype)
    for parameter in norm.parameters():
        parameter.data.normal_()
    x_TD, residual_TD = torch.randn(4, 16, dtype=dtype), torch.randn(4, 16, dtype=dtype)
    total_TD, before = x_TD + residual_TD, residual_TD.clone()
    normed_TD, new_residual_TD = norm.add_and_norm(x_TD, residual_TD)
    assert torch.equal(new_residual_TD, total_TD)
    assert torch.equal(residual_TD, before)
    torch.testing.assert_close(normed_TD, norm(total_TD), rtol=1e-6, atol=1e-6)


def test_layer_norm_is_torch_s() -> None:
    ours, theirs = LayerNorm(24, 1e-3), nn.LayerNorm(24, eps=1e-3)
    for parameter in theirs.parameters():
        parameter.data.normal_()
    ours.load_state_dict(theirs.state_dict())
    x_TD = 1 + 2 * torch.randn(5, 24)
    torch.testing.assert_close(ours(x_TD), theirs(x_TD).detach())


def test_queries_and_keys_are_normed_over_all_their_heads_together() -> None:
    norm = WholeQueryKeyNorm(num_heads=3, num_kv_heads=2, head_size=8, eps=1e-5)
    for parameter in norm.parameters():
        parameter.data.normal_()
    # A view of a wider tensor, as heads beside their values are.
    heads_THD = torch.randn(5, 7, 8)[:, :5]
    normed_THD = norm(heads_THD)
    query_TX, key_TX = heads_THD[:, :3].flatten(1), heads_THD[:, 3:].flatten(1)
    expected = [
        F.rms_norm(query_TX, (24,), norm.q_norm.weight, 1e-5),
        F.rms_norm(key_TX, (16,), norm.k_norm.weight, 1e-5),
    ]
    torch.testing.assert_close(normed_THD.flatten(1), torch.cat(expected, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scaled_embedding_rounds_its_scale_as_transformers_does(dtype: torch.dtype) -> None:
    theirs = Gemma2TextScaledWordEmbedding(11, 48, 0, embed_scale=48**0.5)
    theirs.weight.data.normal_()
    theirs = theirs.to(dtype)
    ours = ScaledVocabEmbedding(11, 48, scale=48**0.5, parallel=ParallelState())
    ours.weight = nn.Parameter(theirs.weight.detach(), requires_grad=False)
    before = ours.weight.clone()
    tokens = torch.tensor([3, 0, 10, 3])
    assert torch.equal(ours(tokens, NO_CONTEXT), theirs(tokens).detach())
    assert torch.equal(ours.weight, before)


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
