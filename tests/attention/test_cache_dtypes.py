"""KV caches in float32, bfloat16 and int8: attention over the quantised values, and their memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.native import NATIVE, NativeKernels
from penstock.kernels.native.attention import HeadShape, StepRequests

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")


def _kernels() -> NativeKernels:
    assert NATIVE is not None
    return NATIVE


def _rounded(vectors: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Vectors [..., D] after quantisation and dequantisation in a cache of this dtype."""
    if dtype is not torch.int8:
        return torch.from_numpy(vectors).to(dtype).double().numpy()
    largest = np.abs(vectors).max(-1, keepdims=True)
    scale = np.where(largest > 1e-30, largest / np.float32(127), np.float32(1)).astype(np.float32)
    return np.rint(vectors.astype(np.float64) / scale) * scale.astype(np.float64)


def _attend(query_THD: np.ndarray, key_TKD: np.ndarray, value_TKD: np.ndarray, window: int | None) -> np.ndarray:
    """Causal attention of all positions over themselves, in float64."""
    num_tokens, num_heads, _ = query_THD.shape
    group = num_heads // key_TKD.shape[1]
    key_THD, value_THD = (np.repeat(part, group, axis=1) for part in (key_TKD, value_TKD))
    scores = np.einsum("qhd,khd->hqk", query_THD.astype(np.float64), key_THD) * 0.2
    positions = np.arange(num_tokens)
    is_seen = positions[None] <= positions[:, None]
    if window is not None:
        is_seen &= positions[None] > positions[:, None] - window
    weights = np.exp(np.where(is_seen, scores, -np.inf) - np.where(is_seen, scores, -np.inf).max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value_THD)


def _run(heads_TXD: torch.Tensor, dtype: torch.dtype, num_kv_heads: int, block_size: int, window: int | None) -> Any:
    num_tokens, num_heads, head_size = heads_TXD.shape
    num_heads -= 2 * num_kv_heads
    num_blocks = -(-num_tokens // block_size)
    width = head_size + (4 if dtype is torch.int8 else 0)
    kv_cache = torch.full((2, num_blocks + 1, num_kv_heads, block_size, width), -1, dtype=dtype)
    requests = StepRequests.of(
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32),
        torch.arange(num_blocks, 0, -1, dtype=torch.int32)[None],
        1,
    )
    shape = HeadShape(num_heads, num_kv_heads, head_size, block_size, 0.2, window, None)
    parts = heads_TXD.split([num_heads, num_kv_heads, num_kv_heads], 1)
    return _kernels().attention(*parts, kv_cache, requests, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(1, 90),
    num_kv_heads=st.integers(1, 3),
    group_size=st.sampled_from([1, 2, 5, 8]),
    head_size=st.sampled_from([7, 8, 20, 64]),
    block_size=st.sampled_from([1, 5, 16, 70]),
    window=st.sampled_from([None, 1, 9]),
    magnitude=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_attention_is_that_over_the_rounded_keys_and_values(
    dtype: torch.dtype,
    num_tokens: int,
    num_kv_heads: int,
    group_size: int,
    head_size: int,
    block_size: int,
    window: int | None,
    magnitude: float,
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    num_heads = num_kv_heads * group_size
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_size, generator=generator)
    heads[:, num_heads + num_kv_heads :] *= magnitude
    actual = _run(heads, dtype, num_kv_heads, block_size, window)
    query, key, value = (part.numpy() for part in heads.split([num_heads, num_kv_heads, num_kv_heads], 1))
    expected = _attend(query, _rounded(key, dtype), _rounded(value, dtype), window)
    error, exact = np.abs(actual.numpy() - expected), 1e-5 * np.abs(expected) + 2e-5 * max(1.0, magnitude)
    if dtype is not torch.int8:
        assert (error <= exact).all()
        return
    # An element that lies halfway between two int8 values may go either way in float32: a whole step where a value is
    # all that is seen, and little where it is one of many, or a key's.
    is_off = error > exact + magnitude / 127 / 8
    assert is_off.sum() <= max(2, 0.01 * error.size)
    assert error.max() <= exact.max() + 5 * magnitude / 127


@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (640, 16), (512, 16), (64, 700), (16, 512)])
def test_sums_of_the_largest_integers_have_room(head_size: int, block_size: int) -> None:
    """With all elements at the limits of int8 and int16, sums of products do not overflow."""
    heads = torch.ones(2 * block_size, 4, head_size)
    heads[:, :2] = torch.tensor([5.0, -5.0])[:, None]
    heads[: block_size + 3, 2] = -1.0  # the first query head sees what comes after them, the second them
    heads[:, 3] = torch.where(heads[:, 2] < 0, 3.0, -2.0)
    output = _run(heads, torch.int8, 1, block_size, None)[-1]
    torch.testing.assert_close(output, torch.tensor([-2.0, 3.0])[:, None].expand(-1, head_size), rtol=1e-4, atol=0)


def test_many_positions_that_weigh_little_are_not_lost() -> None:
    """A position that weighs 30,000 times as much as each of 4,000 others leaves them their eighth."""
    heads = torch.zeros(4001, 3, 16)
    heads[:, 0, 0] = 5.0
    heads[17, 1, 0] = math.log(30_000)
    heads[:, 2] = torch.linspace(1.0, 2.0, 16)
    heads[17, 2] = -1.0
    output = _run(heads, torch.int8, 1, 16, None)[-1, 0]
    expected = (4000 * torch.linspace(1.0, 2.0, 16) - 30_000) / 34_000
    torch.testing.assert_close(output, expected, rtol=0, atol=0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(dtype: torch.dtype, part: int, poison: float) -> None:
    heads = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))
    heads[4, part, 3] = poison
    output = _run(heads, dtype, 1, 4, None)
    assert not torch.isfinite(output[4]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_keys_and_values_of_zero_are_kept(dtype: torch.dtype) -> None:
    heads = torch.zeros(3, 3, 16)
    heads[:, 0] = 1.0
    heads[2, 2] = 1e-38
    output = _run(heads, dtype, 1, 4, None)
    assert torch.isfinite(output).all()
    assert output.abs().max() < 1e-37
