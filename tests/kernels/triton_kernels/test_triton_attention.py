"""Triton's paged attention against the specification in torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.paged_steps import Step, assert_equal, make_step
from support.triton_device import DEVICE, needs_triton

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = needs_triton

import support.triton_interpreter  # noqa: E402, F401 - repairs the interpreter
from penstock.kernels.triton.paged_attention import (  # noqa: E402
    choose_num_splits,
    decode_attention,
    prefill_attention,
)


def _decode(
    step: Step,
    window: int | None = None,
    soft_cap: float | None = None,
    num_splits: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    step_and_layer = step.query_THD, *step.cache, step.block_table, step.seq_lens, step.scale, window, soft_cap, sinks_H
    return decode_attention(*step_and_layer, num_splits=num_splits)


def _prefill(
    step: Step, window: int | None = None, soft_cap: float | None = None, sinks_H: Tensor | None = None
) -> Tensor:
    layout = step.block_table, step.query_start_loc, step.seq_lens
    return prefill_attention(step.query_THD, *step.cache, *layout, step.scale, window, soft_cap, sinks_H)


LENGTHS = (1, 16, 17, 63, 64, 65, 130, 300)
DECODES = [(length - 1, 1) for length in LENGTHS]
# Decodes, whole prompts, and chunks behind positions that are in the cache already.
MIXED = [(0, 1), (130, 1), (0, 5), (17, 16), (0, 33), (200, 70), (0, 130)]


@pytest.mark.parametrize("num_splits", [1, 2, 8, 32, None])
@pytest.mark.parametrize("window", [None, 1, 20, 200])
def test_decodes_equal_the_specification(num_splits: int | None, window: int | None) -> None:
    step = make_step(DECODES)
    assert_equal(_decode(step, window, num_splits=num_splits), step.expected(window))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (8, 2), (8, 1), (7, 1), (20, 1)])
@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_grouped_query_heads_and_block_sizes(num_heads: int, num_kv_heads: int, block_size: int) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "block_size": block_size}
    decodes, mixed = make_step(DECODES[-3:], **shape), make_step(MIXED[:-1], **shape)
    assert_equal(_decode(decodes, num_splits=2), decodes.expected())
    assert_equal(_prefill(mixed), mixed.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [8, 64, 80, 128, 256])
def test_head_sizes_and_dtypes(head_size: int, dtype: torch.dtype) -> None:
    shape = {"head_size": head_size, "dtype": dtype, "num_kv_heads": 1, "num_heads": 2}
    decodes, mixed = make_step([(0, 1), (150, 1)], **shape), make_step([(30, 1), (0, 20), (70, 40)], **shape)
    assert_equal(_decode(decodes, num_splits=1), decodes.expected(), dtype)
    assert_equal(_decode(decodes, num_splits=2), decodes.expected(), dtype)
    assert_equal(_prefill(mixed), mixed.expected(), dtype)


@pytest.mark.parametrize("window", [None, 1, 20, 150])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_prefills_equal_the_specification(window: int | None, soft_cap: float | None) -> None:
    step = make_step(MIXED)
    assert_equal(_prefill(step, window, soft_cap), step.expected(window, soft_cap))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
def test_decodes_with_soft_caps(window: int | None, soft_cap: float) -> None:
    step = make_step(DECODES)
    assert_equal(_decode(step, window, soft_cap, num_splits=2), step.expected(window, soft_cap))


@pytest.mark.parametrize("window", [None, 20])
def test_attention_sinks(window: int | None) -> None:
    """One without weight, two with some, and one with nearly all."""
    sinks_H = torch.tensor([-200.0, 0.25, 3.0, 30.0], device=DEVICE)
    mixed, decodes = make_step(MIXED), make_step(DECODES)
    assert_equal(_prefill(mixed, window, sinks_H=sinks_H), mixed.expected(window, sinks_H=sinks_H))
    for num_splits in (1, 4):
        found = _decode(decodes, window, num_splits=num_splits, sinks_H=sinks_H)
        assert_equal(found, decodes.expected(window, sinks_H=sinks_H))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_rows_of_padding_give_zeros(num_splits: int) -> None:
    step = make_step([(40, 1), (99, 1), (5, 1)])
    expected = step.expected()
    step.seq_lens[2] = 0
    # A row of length 0, and one beyond the lengths.
    step.query_THD = torch.cat([step.query_THD, step.query_THD[:1]])
    output = _decode(step, num_splits=num_splits)
    assert_equal(output[:2], expected[:2])
    assert (output[2:] == 0).all()


def test_prefill_rows_and_tokens_of_padding_give_zeros() -> None:
    step = make_step([(40, 1), (9, 30)])
    expected = step.expected()
    padding = step.query_THD[:5]
    step.query_THD = torch.cat([step.query_THD, padding])
    step.query_start_loc = torch.cat([step.query_start_loc, step.query_start_loc[-1:].repeat(3)])
    step.seq_lens = torch.cat([step.seq_lens, torch.zeros_like(step.seq_lens).repeat(2)[:3]])
    step.block_table = torch.cat([step.block_table, step.block_table, step.block_table])[:5]
    output = _prefill(step)
    assert_equal(output[:31], expected)
    assert (output[31:] == 0).all()


def test_strided_queries() -> None:
    step = make_step([(40, 1), (9, 30)])
    expected = step.expected()
    width = step.query_THD.shape[1] * step.query_THD.shape[2]
    rows = torch.randn(31, 2 * width + 3, device=DEVICE)
    rows[:, :width] = step.query_THD.flatten(1)
    step.query_THD = rows[:, :width].view(31, *step.query_THD.shape[1:])
    assert_equal(_prefill(step), expected)


def test_splits_are_powers_of_two_from_the_shapes() -> None:
    device = torch.device("cpu")
    assert choose_num_splits(1, 8, 1 << 17, device) == 32
    assert choose_num_splits(1, 8, 128, device) == 1
    assert choose_num_splits(8, 8, 1 << 17, device) == 8
    assert choose_num_splits(256, 8, 1 << 17, device) == 1
    assert choose_num_splits(1, 1, 1536, device) == 8


_COMPILED = """
import sys
sys.path[:0] = {paths!r}
import pytest, torch
from support.triton_compile import compile_only
from penstock.kernels.triton.kv_cache import rotate_and_write
from penstock.kernels.triton.paged_attention import decode_attention, prefill_attention
counts = compile_only(pytest.MonkeyPatch())
for num_heads, num_kv_heads, head_size in ((32, 8, 128), (16, 8, 128)):
    pages = torch.empty(4, 2, num_kv_heads, 16, head_size, dtype=torch.bfloat16)
    keys, values = pages.transpose(0, 1).transpose(2, 3)
    for num_rows in (1, 64, 256):
        qkv = torch.empty(num_rows, (num_heads + 2 * num_kv_heads) * head_size, dtype=torch.bfloat16)
        numbers = torch.zeros(num_rows, dtype=torch.int64)
        query = rotate_and_write(qkv, num_heads, torch.empty(64, head_size), numbers, keys, values, numbers)
        table, lengths = torch.zeros(num_rows, 128, dtype=torch.int32), numbers.int()
        decode_attention(query, keys, values, table, lengths, 0.1)
        prefill_attention(query, keys, values, table, torch.zeros(num_rows + 1, dtype=torch.int32), lengths, 0.1)
print(counts)
"""


def test_the_kernels_compile_for_an_h100_once_per_number_of_heads() -> None:
    """In a process without the interpreter; no GPU is needed. Decodes compile with and without splits."""
    script = _COMPILED.format(paths=[str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = ast.literal_eval(done.stdout)
    assert counts == {"_rotate_and_write_kernel": 2, "decode_kernel": 4, "merge_kernel": 1, "prefill_kernel": 2}


_COMPILED_FOR_OTHERS = """
import sys
sys.path[:0] = {paths!r}
import pytest, torch
from triton.backends.compiler import GPUTarget
from support.triton_compile import compile_only
from penstock.device.capability import CHOICES
from penstock.kernels.triton import paged_attention
patch = pytest.MonkeyPatch()
major, minor = {capability}
patch.setattr(paged_attention, "gpu_capability", lambda: (major, minor))
target = GPUTarget("cuda", 10 * major + minor, 32)
counts = compile_only(patch, target, most_shared=CHOICES[major, minor].shared_kib << 10)
for head_size in (64, 128, 256):
    pages = torch.empty(4, 2, 2, 16, head_size, dtype=torch.bfloat16)
    query, table = torch.empty(8, 8, head_size, dtype=torch.bfloat16), torch.zeros(8, 128, dtype=torch.int32)
    lengths, starts = torch.zeros(8, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    keys, values = pages.transpose(0, 1).transpose(2, 3)
    paged_attention.prefill_attention(query, keys, values, table, starts, lengths, 0.1)
print(counts)
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (12, 0)], ids=str)
def test_prefill_attention_fits_into_the_shared_memory_of_other_gpus(capability: tuple[int, int]) -> None:
    """In a process without the interpreter; no GPU is needed. Heads of 64, 128 and 256 dimensions."""
    script = _COMPILED_FOR_OTHERS.format(paths=[str(Path(__file__).parents[2])], capability=capability)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ast.literal_eval(done.stdout) == {"prefill_kernel": 3}
