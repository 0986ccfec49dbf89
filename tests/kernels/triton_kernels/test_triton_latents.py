"""Triton's attention over latents against its definition, alone and in a batch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from penstock.kernels.paged_attention import paged_attention_reference
from penstock.kernels.triton import latent_attention as latent_module
from penstock.kernels.triton.latent_attention import latent_attention
from support.paged_steps import Step, assert_equal, make_step
from support.triton_device import needs_triton
from support.triton_interpreter import products_by_row

pytestmark = needs_triton
KEY_SIZE, LATENT_SIZE = 40, 24
STEP = [(70, 1), (0, 5), (33, 9)]


def _step(parts: Sequence[tuple[int, int]], num_heads: int = 5, dtype: torch.dtype = torch.float32) -> Step:
    return make_step(parts, num_heads=num_heads, num_kv_heads=1, head_size=KEY_SIZE, dtype=dtype)


def _attend(step: Step, num_splits: int | None = None, *, is_invariant: bool = False) -> Tensor:
    layout = step.block_table, step.query_start_loc, step.seq_lens
    options = {"num_splits": num_splits, "is_invariant": is_invariant}
    return latent_attention(step.query_THD, step.key_cache, *layout, step.scale, LATENT_SIZE, **options)


def _expected(step: Step) -> Tensor:
    cache = step.key_cache.float().nan_to_num(7.0)
    layout = step.block_table, step.query_start_loc, step.seq_lens, step.max_query_len
    values = cache[..., -LATENT_SIZE:]
    return paged_attention_reference(step.query_THD.float(), cache, values, *layout, step.scale, None, None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_splits", "is_invariant"), [(1, False), (4, False), (None, False), (1, True), (2, True)])
@pytest.mark.parametrize("num_heads", [5, 20])
def test_attention_equals_its_definition(
    num_heads: int, num_splits: int | None, is_invariant: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_module, "FIXED_SPLIT", 32)
    step = _step(STEP, num_heads, dtype)
    assert_equal(_attend(step, num_splits, is_invariant=is_invariant), _expected(step), dtype)


def test_a_token_has_the_same_bits_alone_in_a_batch_in_chunks_and_for_any_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products_by_row(monkeypatch)
    monkeypatch.setattr(latent_module, "FIXED_SPLIT", 32)
    step = _step(STEP)
    found = _attend(step, 1, is_invariant=True)
    assert torch.equal(_attend(step, 2, is_invariant=True), found)
    for first, last in ((0, 9), (8, 9), (2, 5)):
        part = step.part_of_last(first, last)
        for num_splits in (1, 2):
            assert torch.equal(_attend(part, num_splits, is_invariant=True), found[-9:][first:last])


@pytest.mark.parametrize("num_splits", [1, 4])
def test_rows_and_tokens_of_padding_give_zeros(num_splits: int) -> None:
    step = _step(STEP)
    expected = _expected(step)
    step.query_THD = torch.cat([step.query_THD, step.query_THD[:4]])
    step.query_start_loc = torch.cat([step.query_start_loc, step.query_start_loc[-1:] + 2])
    step.seq_lens = torch.cat([step.seq_lens, torch.zeros_like(step.seq_lens[:1])])
    step.block_table = torch.cat([step.block_table, step.block_table[:1]])
    output = _attend(step, num_splits)
    assert_equal(output[:15], expected)
    assert (output[15:] == 0).all()


_COMPILED = """
import sys
sys.path[:0] = {paths!r}
import pytest, torch
from support.triton_compile import LEAST_SHARED, compile_only
from penstock.kernels.triton.latent_attention import latent_attention
counts = compile_only(pytest.MonkeyPatch(), most_shared=LEAST_SHARED)
for dtype in (torch.bfloat16, torch.float32):
    cache = torch.empty(4, 16, 1, 576, dtype=dtype)
    for num_rows in (1, 4, 512):
        starts = torch.zeros(num_rows + 1, dtype=torch.int32)
        table, query = torch.zeros(num_rows, 128, dtype=torch.int32), torch.empty(num_rows, 16, 576, dtype=dtype)
        latent_attention(query, cache, table, starts, starts[1:], 0.1, 512)
print(counts)
"""


def test_the_kernels_compile_for_any_gpu_once_per_dtype() -> None:
    """In a process without the interpreter; no GPU is needed. Each compiles with and without splits."""
    script = _COMPILED.format(paths=[str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ast.literal_eval(done.stdout) == {"_latent_kernel": 4, "merge_kernel": 2}
