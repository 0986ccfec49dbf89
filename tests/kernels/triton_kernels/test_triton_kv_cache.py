"""Triton's rotary embedding and cache writes against the specifications in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.norm import rms_norm_reference, rms_norm_rounded_last
from penstock.kernels.rotary import TableRotation, apply_rotary, gather_rotation, rotary_table
from support.triton_device import DEVICE, needs_triton

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = needs_triton

import support.triton_interpreter  # noqa: E402, F401 - repairs the interpreter
from penstock.kernels.triton import rotary  # noqa: E402
from penstock.kernels.triton.kv_cache import rotate_and_write, write_kv  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def _table(rotated: int) -> Tensor:
    return rotary_table(1.0 / 100 ** torch.linspace(0, 1, rotated // 2), 100, 1.25).to(DEVICE)


def _rotated(heads_THD: Tensor, table_PR: Tensor, positions_T: Tensor) -> Tensor:
    """By definition, in float64."""
    cos, sin = table_PR[positions_T].double()[:, None].chunk(2, -1)
    half = cos.shape[-1]
    wide = heads_THD.double()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def _cache(num_kv_heads: int, head_size: int, dtype: torch.dtype, block_size: int = 16) -> Tensor:
    return torch.zeros(6, 2, block_size, num_kv_heads, head_size, dtype=dtype, device=DEVICE).transpose(0, 1)


def _at(cache: Tensor, slots: Tensor) -> Tensor:
    """The cells of these slots, [2, slots, K, D]."""
    return cache[:, slots // cache.shape[2], slots % cache.shape[2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "head_size", "rotated"), [(1, 16, 16), (5, 80, 80), (3, 64, 24), (70, 32, 32), (2, 8, 2)]
)
def test_rotary_rotates_in_place(num_heads: int, head_size: int, rotated: int, dtype: torch.dtype) -> None:
    buffer = _randn(4, num_heads + 2, head_size, dtype=dtype)
    before, table = buffer.clone(), _table(rotated)
    positions = torch.tensor([0, 3, 99, 17], device=DEVICE)
    rotary.apply_rotary(buffer[:, 1:-1], table, positions)
    expected = _rotated(before[:, 1:-1], table, positions)
    # Half a unit in the last place of the largest results, about 4.
    tolerance = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(buffer[:, 1:-1].double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(buffer[:, [0, -1]], before[:, [0, -1]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations_of_a_table_are_what_kernels_with_a_lookup_take(dtype: torch.dtype) -> None:
    table, positions = _table(16), torch.tensor([5, 9], dtype=torch.int32, device=DEVICE)
    rotation = gather_rotation(table, positions, dtype)
    assert isinstance(rotation, TableRotation)
    heads = _randn(2, 3, 16, dtype=dtype)
    expected = _rotated(heads, table, positions)
    apply_rotary(heads, rotation)
    torch.testing.assert_close(heads.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "head_size", "block_size"), [(1, 16, 16), (3, 80, 32), (2, 128, 256)])
def test_keys_and_values_are_written_to_their_slots(
    num_kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype
) -> None:
    cache = _cache(num_kv_heads, head_size, dtype, block_size)
    slots = torch.tensor([17, 5 * block_size + 3, -1, 0, -1], device=DEVICE)
    key, value = (
        _randn(5, num_kv_heads, head_size, dtype=dtype),
        _randn(5, num_kv_heads, head_size, dtype=dtype, seed=1),
    )
    # Heads need not lie side by side.
    write_kv(key.transpose(0, 1).contiguous().transpose(0, 1), value, cache[0], cache[1], slots)
    expected = torch.zeros_like(cache)
    written = slots[slots >= 0]
    for half, rows in zip(expected, (key, value), strict=True):
        half[written // block_size, written % block_size] = rows[slots >= 0]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, "rounded first", "rounded last", "after rotation"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "rotated"),
    [(4, 2, 16, 16), (3, 1, 20, 20), (2, 2, 32, 12), (20, 4, 64, 64)],
)
def test_the_fused_kernel_is_norm_rotation_and_write(
    num_heads: int, num_kv_heads: int, head_size: int, rotated: int, norm: str | None, dtype: torch.dtype
) -> None:
    num_rotated = num_heads + num_kv_heads
    qkv = _randn(5, (num_rotated + num_kv_heads) * head_size + 7, dtype=dtype)[:, :-7]
    before, table = qkv.clone(), _table(rotated)
    positions = torch.tensor([0, 3, 99, 17, 1], device=DEVICE)
    slots = torch.tensor([17, 80, -1, 0, -1], device=DEVICE)
    cache = _cache(num_kv_heads, head_size, dtype)
    weight = _randn(num_rotated, head_size, dtype=dtype, seed=2)
    heads = before.view(5, -1, head_size)
    normed = heads[:, :num_rotated]
    rms = None
    if norm == "rounded first":
        normed, rms = rms_norm_reference(normed, weight, EPS), (weight, EPS)
    elif norm == "rounded last":
        normed, rms = rms_norm_rounded_last(normed, weight, EPS), (weight.float(), EPS)
    expected = _rotated(normed, table, positions)
    is_last = norm == "after rotation"
    if is_last:
        expected, rms = rms_norm_reference(expected.to(dtype), weight, EPS).double(), (weight, EPS)

    query = rotate_and_write(qkv, num_heads, table, positions, cache[0], cache[1], slots, rms, norm_is_last=is_last)

    assert torch.equal(qkv, before)
    tolerance = max(3 * torch.finfo(dtype).eps, 3e-6)
    torch.testing.assert_close(query.double(), expected[:, :num_heads], rtol=tolerance, atol=tolerance)
    is_written = slots >= 0
    keys, values = _at(cache, slots[is_written])
    torch.testing.assert_close(keys.double(), expected[is_written, num_heads:], rtol=tolerance, atol=tolerance)
    assert torch.equal(values, heads[is_written, num_rotated:])
    unwritten = cache.transpose(0, 1).transpose(1, 2).flatten(0, 1).clone()
    unwritten[slots[is_written]] = 0
    assert not unwritten.any()
