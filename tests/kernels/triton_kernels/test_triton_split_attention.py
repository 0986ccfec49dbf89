"""Split-KV attention of several queries per row, and batch-invariant attention, against the specification in torch."""

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
from support.triton_device import needs_triton

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = needs_triton

from penstock.kernels.triton import split_attention as split_module  # noqa: E402
from penstock.kernels.triton.split_attention import split_attention  # noqa: E402
from support.triton_interpreter import products_by_row  # noqa: E402

# Verifications of three drafts, of fewer, and of none.
VERIFICATIONS = [(0, 4), (61, 4), (99, 3), (70, 1)]
MIXED = [(70, 1), (0, 5), (63, 2), (40, 30)]


def _attend(
    step: Step,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
    *,
    max_query_len: int | None = None,
    num_splits: int | None = None,
) -> Tensor:
    layout = step.block_table, step.query_start_loc, step.seq_lens
    options = {"max_query_len": max_query_len, "num_splits": num_splits}
    return split_attention(step.query_THD, *step.cache, *layout, step.scale, window, soft_cap, sinks_H, **options)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of one tile of float32."""
    monkeypatch.setattr(split_module, "FIXED_SPLIT", 32)


@pytest.mark.parametrize(("num_splits", "window"), [(1, None), (4, None), (None, 20), (4, 2)])
def test_verifications_equal_the_specification(num_splits: int | None, window: int | None) -> None:
    step = make_step(VERIFICATIONS)
    found = _attend(step, window, max_query_len=4, num_splits=num_splits)
    assert_equal(found, step.expected(window))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_verifications_with_soft_caps_sinks_and_large_groups(num_splits: int) -> None:
    sinks_H = torch.tensor([-200.0, 0.25, 3.0, 30.0, 0.0, 1.0, 2.0], device=make_step([(0, 1)]).query_THD.device)
    step = make_step(VERIFICATIONS, num_heads=7, num_kv_heads=1, head_size=24)
    found = _attend(step, None, 2.0, sinks_H, max_query_len=4, num_splits=num_splits)
    assert_equal(found, step.expected(None, 2.0, sinks_H))


@pytest.mark.parametrize(("num_splits", "window", "soft_cap"), [(1, None, None), (2, 20, None), (2, None, 2.0)])
@pytest.mark.usefixtures("short_splits")
def test_invariant_attention_equals_the_specification(
    num_splits: int, window: int | None, soft_cap: float | None
) -> None:
    step = make_step(MIXED)
    sinks_H = torch.tensor([-200.0, 0.25, 3.0, 30.0], device=step.query_THD.device)
    found = _attend(step, window, soft_cap, sinks_H, num_splits=num_splits)
    assert_equal(found, step.expected(window, soft_cap, sinks_H))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.usefixtures("short_splits")
def test_a_token_has_the_same_bits_alone_and_in_a_batch_in_chunks_and_for_any_splits(
    window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last request's last tokens: with the others, alone, one by one, and with splits merged at once or later."""
    products_by_row(monkeypatch)
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_size": 32, "dtype": dtype}
    step = make_step([(30, 1), (50, 12)], **shape)
    found = _attend(step, window, num_splits=1)
    assert torch.equal(_attend(step, window, num_splits=2), found)
    of_last = found[-12:]
    for first, last in ((0, 12), (11, 12), (3, 9)):
        for num_splits in (1, 2):
            part = step.part_of_last(first, last)
            assert torch.equal(_attend(part, window, num_splits=num_splits), of_last[first:last]), (first, last)


@pytest.mark.parametrize("max_query_len", [4, None])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_rows_and_tokens_of_padding_give_zeros(num_splits: int, max_query_len: int | None) -> None:
    step = make_step([(40, 1), (9, 4)])
    expected = step.expected()
    step.query_THD = torch.cat([step.query_THD, step.query_THD])
    step.query_start_loc = torch.cat([step.query_start_loc, step.query_start_loc[-1:] + 2])
    step.seq_lens = torch.cat([step.seq_lens, torch.zeros_like(step.seq_lens[:1])])
    step.block_table = torch.cat([step.block_table, step.block_table[:1]])
    output = _attend(step, max_query_len=max_query_len, num_splits=num_splits)
    assert_equal(output[:5], expected)
    assert (output[5:] == 0).all()


_COMPILED = """
import sys
sys.path[:0] = {paths!r}
import pytest, torch
from support.triton_compile import LEAST_SHARED, compile_only
from penstock.kernels.triton.split_attention import split_attention
counts = compile_only(pytest.MonkeyPatch(), most_shared=LEAST_SHARED)
for dtype, head_size in ((torch.bfloat16, 128), (torch.float32, 256)):
    pages = torch.empty(4, 2, 8, 16, head_size, dtype=dtype)
    keys, values = pages.transpose(0, 1).transpose(2, 3)
    for num_rows in (1, 64):
        starts = torch.zeros(num_rows + 1, dtype=torch.int32)
        table, lengths = torch.zeros(num_rows, 128, dtype=torch.int32), starts[1:]
        for max_query_len in (4, None):
            query = torch.empty(num_rows * 4, 32, head_size, dtype=dtype)
            split_attention(query, keys, values, table, starts, lengths, 0.1, max_query_len=max_query_len)
print(counts)
"""


def test_the_kernels_compile_for_any_gpu_once_per_head_size_and_dtype() -> None:
    """In a process without the interpreter; no GPU is needed. Each compiles with and without splits."""
    script = _COMPILED.format(paths=[str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = ast.literal_eval(done.stdout)
    assert counts == {"_split_kernel": 8, "merge_in_order_kernel": 2, "merge_kernel": 2}
