"""An FP8 KV cache in Triton: values rounded to e4m3, and attention over them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import support.triton_interpreter  # noqa: F401 - repairs the interpreter
from penstock.kernels.paged_attention import CacheScales, as_stored, paged_attention_reference
from penstock.kernels.rotary import rotary_table
from penstock.kernels.triton.kv_cache import rotate_and_write, write_kv
from penstock.kernels.triton.paged_attention import decode_attention, prefill_attention
from penstock.kernels.triton.split_attention import split_attention
from support.triton_device import DEVICE, needs_triton

pytestmark = needs_triton
FP8 = torch.float8_e4m3fn
BLOCK_SIZE, NUM_BLOCKS = 16, 12


def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def _cache(num_kv_heads: int, head_size: int) -> Tensor:
    shape = 2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_size
    return torch.zeros(shape, dtype=torch.uint8, device=DEVICE).view(FP8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_rounded_to_the_nearest_and_saturate(dtype: torch.dtype) -> None:
    cache, slots = _cache(2, 16), torch.tensor([17, 3, -1, 50], device=DEVICE)
    key, value = _randn(4, 2, 16, dtype=dtype), 3 * _randn(4, 2, 16, dtype=dtype, seed=1)
    key[0, 0, 0], value[1, 1, 3] = 1000.0, -5000.0
    write_kv(key, value, cache[0], cache[1], slots)
    for half, given in zip(cache, (key, value), strict=True):
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                found = half[slot // BLOCK_SIZE, slot % BLOCK_SIZE]
                expected = given[row].float().clamp(-448, 448).to(FP8)
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_the_fused_kernel_writes_rotated_keys() -> None:
    cache, slots = _cache(2, 16), torch.tensor([17, 3], device=DEVICE)
    table = rotary_table(1.0 / 100 ** torch.linspace(0, 1, 8), 100, 1.0).to(DEVICE)
    qkv, positions = _randn(2, 8 * 16), torch.tensor([4, 9], device=DEVICE)
    plain = torch.zeros(cache.shape, device=DEVICE)
    rotate_and_write(qkv, 4, table, positions, plain[0], plain[1], slots)
    rotate_and_write(qkv, 4, table, positions, cache[0], cache[1], slots)
    assert torch.equal(cache.view(torch.uint8), plain.to(FP8).view(torch.uint8))


SCALES = CacheScales(0.3, 7.0)


def test_values_are_divided_by_their_scale_and_then_do_not_saturate() -> None:
    cache, slots = _cache(2, 16), torch.tensor([17, 3], device=DEVICE)
    key, value = _randn(2, 2, 16), 500 * _randn(2, 2, 16, seed=1)
    write_kv(key, value, cache[0], cache[1], slots, SCALES)
    for half, given, scale in zip(cache, (key, value), SCALES, strict=True):
        found = half.view(-1, 2, 16)[[17, 3]]
        assert torch.equal(found.view(torch.uint8), (given / scale).to(FP8).view(torch.uint8))
        torch.testing.assert_close(found.float() * scale, given, rtol=2**-4, atol=scale * 2**-9)
    assert value.abs().max() > 448


def test_the_fused_kernel_divides_rotated_keys_by_their_scale() -> None:
    cache, slots = _cache(2, 16), torch.tensor([17, 3], device=DEVICE)
    table = rotary_table(1.0 / 100 ** torch.linspace(0, 1, 8), 100, 1.0).to(DEVICE)
    qkv, positions = _randn(2, 8 * 16), torch.tensor([4, 9], device=DEVICE)
    plain = torch.zeros(cache.shape, device=DEVICE)
    rotate_and_write(qkv, 4, table, positions, plain[0], plain[1], slots)
    rotate_and_write(qkv, 4, table, positions, cache[0], cache[1], slots, scales=SCALES)
    for half, given, scale in zip(cache, plain, SCALES, strict=True):
        assert torch.equal(half.view(torch.uint8), as_stored(given, FP8, scale).view(torch.uint8))


@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(None, False), (3.0, True)])
def test_attention_dequantises_with_the_scales(soft_cap: float | None, *, has_sinks: bool) -> None:
    """Against the specification over a float32 cache of the values that the stored ones stand for."""
    cache = _randn(2, NUM_BLOCKS, BLOCK_SIZE, 2, 16).to(FP8)
    keys, values = (half.float() * scale for half, scale in zip(cache, SCALES, strict=True))
    table = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([5, 33, 48], dtype=torch.int32, device=DEVICE)
    parameters = 0.25, None, soft_cap, _randn(4, seed=4) if has_sinks else None
    for counts in ((1, 1, 1), (2, 5, 20)):
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
        query = _randn(sum(counts), 4, 16, seed=3)
        layout = table, starts, lengths
        expected = paged_attention_reference(query, keys, values, *layout, max(counts), *parameters)
        step = query, cache[0], cache[1], *layout, *parameters
        found = [prefill_attention(*step, scales=SCALES)]
        found += [split_attention(*step, scales=SCALES, num_splits=number) for number in (1, 2)]
        found += [split_attention(*step, scales=SCALES, max_query_len=20, num_splits=number) for number in (1, 2)]
        if max(counts) == 1:
            decodes = query, cache[0], cache[1], table, lengths, *parameters
            found += [decode_attention(*decodes, scales=SCALES, num_splits=number) for number in (1, 2)]
        for one in found:
            torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(4, 2, 16), (3, 1, 80)])
def test_attention_reads_the_rounded_values(
    num_heads: int, num_kv_heads: int, head_size: int, window: int | None, dtype: torch.dtype
) -> None:
    cache = _randn(2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_size).to(FP8)
    table = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([5, 33, 48], dtype=torch.int32, device=DEVICE)
    scale = head_size**-0.5
    for counts in ((1, 1, 1), (2, 5, 20)):
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
        query = _randn(sum(counts), num_heads, head_size, dtype=dtype, seed=3)
        expected = paged_attention_reference(
            query.float(), cache[0].float(), cache[1].float(), table, starts, lengths, max(counts), scale, window
        )
        found = prefill_attention(query, cache[0], cache[1], table, starts, lengths, scale, window)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
        if max(counts) == 1:
            for num_splits in (1, 2):
                found = decode_attention(
                    query, cache[0], cache[1], table, lengths, scale, window, num_splits=num_splits
                )
                torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


_COMPILED = """
import sys
sys.path[:0] = {paths!r}
import pytest, torch
from support.triton_compile import compile_only
from penstock.kernels.triton.kv_cache import rotate_and_write, write_kv
from penstock.kernels.paged_attention import CacheScales
from penstock.kernels.triton.paged_attention import decode_attention, prefill_attention
from penstock.kernels.triton.split_attention import split_attention
compile_only(pytest.MonkeyPatch())
pages = torch.empty(4, 2, 8, 16, 128, dtype=torch.float8_e4m3fn)
keys, values = pages.transpose(0, 1).transpose(2, 3)
scales = CacheScales(0.3, 7.0)
qkv, numbers = torch.empty(64, 48 * 128, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
query = rotate_and_write(qkv, 32, torch.empty(64, 128), numbers, keys, values, numbers, None, scales)
heads = torch.empty(64, 8, 128, dtype=torch.bfloat16)
write_kv(heads, heads, keys, values, numbers, scales)
table, lengths = torch.zeros(64, 128, dtype=torch.int32), numbers.int()
decode_attention(query, keys, values, table, lengths, 0.1, scales=scales)
step = query, keys, values, table, torch.zeros(65, dtype=torch.int32), lengths, 0.1
prefill_attention(*step, scales=scales)
split_attention(*step, scales=scales)
"""


def test_the_kernels_compile_for_an_h100() -> None:
    """In a process without the interpreter; no GPU is needed."""
    script = _COMPILED.format(paths=[str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
