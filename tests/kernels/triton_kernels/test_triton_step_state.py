"""The step's state in Triton: bits equal to `PlainStep`'s over whole steps of random states."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import support.triton_interpreter  # noqa: F401 - repairs the interpreter
from penstock.kernels.bound_step import BoundStep, DraftTensors, LayoutTensors, SlotTensors, StepTensors
from penstock.kernels.step_state import PlainStep, bind_step
from penstock.kernels.triton.step_state import TritonStep
from support.triton_device import DEVICE, needs_triton

pytestmark = needs_triton

NUM_SLOTS, LENGTH, MAX_TOKENS = 9, 40, 300
BLOCK_SIZES = {0: (), 1: (4,), 3: (4, 16, 5)}


def _state(random: np.random.Generator, block_sizes: tuple[int, ...], max_drafts: int) -> SlotTensors:
    """Known tokens, blocks and drafts of all slots. Drafts of -1 are none."""
    total_len = random.integers(1, 30, NUM_SLOTS)
    return SlotTensors(
        _int(random.integers(0, 5, (NUM_SLOTS, LENGTH))),
        _long(total_len),
        _long(total_len - 1),
        _long(random.integers(1, total_len + 4)),
        tuple(_int(random.integers(0, 1000, (NUM_SLOTS, -(-LENGTH // size)))) for size in block_sizes),
        block_sizes,
        _int(random.integers(-1, 3, (NUM_SLOTS, max_drafts))),
    )


def _buffers(state: SlotTensors) -> StepTensors:
    """For the largest step, with values that a step must overwrite or leave."""
    num_rows = NUM_SLOTS
    return StepTensors(
        torch.full((MAX_TOKENS,), -7, dtype=torch.int32),
        torch.full((MAX_TOKENS,), -7),
        torch.full((num_rows,), -7, dtype=torch.int32),
        tuple(torch.full((num_rows, table.shape[1]), -7, dtype=torch.int32) for table in state.block_tables_SB),
        tuple(torch.full((MAX_TOKENS,), -7) for _ in state.block_sizes),
    )


def _layout(
    random: np.random.Generator, state: SlotTensors, num_padding_rows: int, num_padding_tokens: int, max_drafts: int
) -> LayoutTensors:
    """Decodes, with drafts if there may be any, and chunks of prompts; then rows and tokens of the padding slot.

    The tensors are views into one upload, as the runner's are.
    """
    num_reqs = int(random.integers(1, NUM_SLOTS - num_padding_rows))
    slots = random.permutation(NUM_SLOTS - 1)[:num_reqs]
    num_drafts = random.integers(0, max_drafts + 1, num_reqs) if max_drafts else np.zeros(num_reqs, dtype=np.int64)
    counts = 1 + num_drafts
    for row in np.flatnonzero(random.integers(0, 3, num_reqs) == 0):
        # A chunk of a prompt, which has no drafts.
        total_len = int(state.total_len_S[slots[row]])
        start = int(random.integers(0, total_len))
        state.num_computed_tokens_S[slots[row]] = start
        num_drafts[row], counts[row] = 0, random.integers(1, total_len - start + 1)
    if max_drafts and not num_drafts.any():
        row = 0
        state.num_computed_tokens_S[slots[row]] = state.total_len_S[slots[row]] - 1
        num_drafts[row], counts[row] = max_drafts, 1 + max_drafts
    num_tokens, num_rows = int(counts.sum()), num_reqs + num_padding_rows
    num_checked = num_drafts * random.integers(0, 2, num_reqs)
    rows_of = 1 + num_checked
    parts = [
        np.concatenate([slots, np.full(num_padding_rows, NUM_SLOTS - 1)]),
        np.concatenate([counts, np.zeros(num_padding_rows, dtype=np.int64)]),
        np.concatenate([np.repeat(np.arange(num_reqs), counts), np.full(num_padding_tokens, num_rows - 1)]),
        np.concatenate([*map(np.arange, counts), np.zeros(num_padding_tokens, dtype=np.int64)]),
        num_drafts,
        num_checked,
        np.cumsum(rows_of) - rows_of,
    ]
    tensors = _long(np.concatenate(parts)).split([len(part) for part in parts])
    drafts = DraftTensors(*tensors[4:], int(num_drafts.max())) if max_drafts else None
    return LayoutTensors(*tensors[:4], num_reqs, num_tokens, drafts)


def _int(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32))


def _long(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int64))


def _copied(value: Any) -> Any:
    """Copies of all tensors on the device. Views of one storage stay so."""
    if isinstance(value, torch.Tensor):
        storage = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(DEVICE, copy=True)
        return storage.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, tuple):
        copies = [_copied(item) for item in value]
        return type(value)(*copies) if hasattr(value, "_fields") else tuple(copies)
    return value


def _assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual.cpu(), expected), (actual, expected)
    elif isinstance(expected, tuple):
        for one, other in zip(actual, expected, strict=True):
            _assert_equal(one, other)
    else:
        assert actual == expected


def _steps(random: np.random.Generator, num_groups: int, max_drafts: int, **padding: int) -> Any:
    """Two implementations of a step, with state, layout and buffers of each."""
    state = _state(random, BLOCK_SIZES[num_groups], max_drafts)
    layout = _layout(random, state, max_drafts=max_drafts, **padding)
    ours = _copied((state, layout, _buffers(state)))
    plain = state, layout, _buffers(state)
    return (PlainStep(*plain), *plain), (TritonStep(*ours), *ours)


@pytest.mark.parametrize("max_drafts", [0, 1, 4])
@pytest.mark.parametrize("num_groups", [0, 1, 3])
@pytest.mark.parametrize(("num_padding_rows", "num_padding_tokens"), [(0, 0), (1, 3), (2, 140)])
@pytest.mark.parametrize("seed", range(3))
def test_inputs_outcome_and_state_equal_the_plain_step(
    max_drafts: int, num_groups: int, num_padding_rows: int, num_padding_tokens: int, seed: int
) -> None:
    random = np.random.default_rng([seed, max_drafts, num_groups, num_padding_rows])
    plain, ours = _steps(
        random,
        num_groups,
        max_drafts,
        num_padding_rows=num_padding_rows,
        num_padding_tokens=num_padding_tokens,
    )
    layout = plain[2]
    num_rows = layout.num_reqs if layout.drafts is None else int((1 + layout.drafts.num_checked_R).sum())
    for number in range(3 if max_drafts == 0 else 1):
        columns = tuple(min(1 + number, table.shape[1]) for table in plain[1].block_tables_SB)
        _assert_equal(ours[0].gather(columns), plain[0].gather(columns))
        _assert_equal(ours[1:], plain[1:])
        sampled = _long(random.integers(0, 3, num_rows))
        failures = _long(random.choice([0, 0, 0, 1, 2], num_rows))
        if number % 2:
            failures = failures > 0
        expected, _ = plain[0].outcome(sampled, failures)
        outcome, on_host = ours[0].outcome(sampled.to(DEVICE), failures.to(DEVICE))
        assert on_host is None
        _assert_equal(outcome.table_RX, expected.table_RX)
        plain[0].advance(expected)
        ours[0].advance(outcome)
        _assert_equal(ours[1:], plain[1:])


@pytest.mark.parametrize("seed", range(8))
def test_drafts_that_are_sampled_are_accepted_up_to_a_failure(seed: int) -> None:
    """Most sampled tokens equal the drafts, unlike random ones; failures are views with a stride."""
    random = np.random.default_rng(seed)
    plain, ours = _steps(random, 1, 4, num_padding_rows=1, num_padding_tokens=2)
    state, layout = plain[1], plain[2]
    sampled: list[int] = []
    for row in range(layout.num_reqs):
        drafts = state.draft_token_ids_SD[layout.idx_mapping_R[row]].tolist()
        sampled += [*drafts, 0][: 1 + int(layout.drafts.num_checked_R[row])]
    failures = random.choice([0] * 4 + [1], 2 * len(sampled))
    expected, _ = _gathered(plain[0]).outcome(_long(sampled), _long(failures)[::2])
    outcome, _ = _gathered(ours[0]).outcome(_long(sampled).to(DEVICE), _long(failures).to(DEVICE)[::2])
    _assert_equal(outcome.table_RX, expected.table_RX)


def _gathered(step: BoundStep) -> BoundStep:
    step.gather((3,))
    return step


def test_columns_of_long_block_tables_are_all_copied() -> None:
    random = np.random.default_rng(0)
    state = _state(random, (1,), 0)._replace(block_tables_SB=(_int(random.integers(0, 9, (NUM_SLOTS, 300))),))
    layout = _layout(random, state, 1, 2, 0)
    state, layout, buffers = _copied((state, layout, _buffers(state)))
    tables = TritonStep(state, layout, buffers).gather((299,)).block_tables_RB[0]
    assert torch.equal(tables, state.block_tables_SB[0][layout.idx_mapping_R, :299])
    assert (buffers.block_tables_RB[0][:, 299] == -7).all()


def test_tokens_in_every_other_place_are_read() -> None:
    random = np.random.default_rng(0)
    plain, ours = _steps(random, 1, 0, num_padding_rows=0, num_padding_tokens=0)
    num_reqs = plain[2].num_reqs
    sampled, failures = _long(random.integers(0, 99, 2 * num_reqs)), _long(random.integers(0, 3, 3 * num_reqs))
    expected, _ = _gathered(plain[0]).outcome(sampled[::2], failures[::3])
    outcome, _ = _gathered(ours[0]).outcome(sampled.to(DEVICE)[::2], failures.to(DEVICE)[::3])
    _assert_equal(outcome.table_RX, expected.table_RX)


def test_an_outcome_keeps_its_table_and_a_step_of_padding_changes_no_state() -> None:
    random = np.random.default_rng(1)
    _, (step, *_) = _steps(random, 1, 0, num_padding_rows=0, num_padding_tokens=0)
    num_reqs = step._table_shape[0]
    zeros = torch.zeros(num_reqs, dtype=torch.int64, device=DEVICE)
    first, _ = _gathered(step).outcome(zeros + 5, zeros)
    step.outcome(zeros + 6, zeros)
    assert first.sampled_token_ids.flatten().tolist() == [5] * num_reqs

    before = _state(random, (4,), 0)
    state = _copied(before)
    padding = _long([NUM_SLOTS - 1, 0, 0, 0, 0, 0]).to(DEVICE).split([1, 1, 2, 2])
    step = TritonStep(state, LayoutTensors(*padding, 0, 0), _copied(_buffers(before)))
    assert step.gather((1,)).slot_mappings_T[0].tolist() == [-1, -1]
    outcome, _ = step.outcome(zeros[:0], zeros[:0])
    assert outcome.table_RX.shape == (0, 4)
    step.advance(outcome)
    _assert_equal(state, before)


def test_a_gpus_tensors_are_bound_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.kernels.step_state.bind_native_step", lambda *arguments: None)
    random = np.random.default_rng(2)
    state = _state(random, (4,), 0)
    bound = bind_step(*_copied((state, _layout(random, state, 0, 0, 0), _buffers(state))))
    assert isinstance(bound, TritonStep)


_COMPILED = """
import sys
import numpy as np, pytest, torch
sys.path[:0] = {paths!r}
from support.triton_compile import compile_only
import test_triton_step_state as tests
counts = compile_only(pytest.MonkeyPatch())
for seed in range(4):
    for max_drafts in (0, 1, 3, 4):
        random = np.random.default_rng(seed)
        padding = {{"num_padding_rows": seed % 2, "num_padding_tokens": seed}}
        _, (step, *_) = tests._steps(random, 1, max_drafts, **padding)
        step.gather((1 + seed,))
        failures = torch.zeros(99, dtype=torch.bool if seed < 2 else torch.int64)
        step.advance(step.outcome(torch.zeros(99, dtype=torch.int64), failures)[0])
print(counts)
"""


def test_the_kernels_compile_once_for_all_sizes_on_an_h100() -> None:
    """In a process without the interpreter; no GPU is needed. Counts: with and without drafts; types of failures."""
    here = Path(__file__)
    script = _COMPILED.format(paths=[str(here.parent), str(here.parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = {"_gather_tokens": 2, "_gather_blocks": 1, "_compute_outcome": 4, "_advance_state": 1}
    assert ast.literal_eval(done.stdout) == counts
