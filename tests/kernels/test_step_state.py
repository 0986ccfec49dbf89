"""The step's state kernels against the worked traces and a restatement in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.kernels.bound_step import BoundStep, DraftTensors, LayoutTensors, SlotTensors, StepTensors
from penstock.kernels.native import NATIVE, bind_native_step
from penstock.kernels.step_state import PlainStep, bind_step

IMPLEMENTATIONS = pytest.mark.parametrize(
    "bind",
    [
        pytest.param(PlainStep, id="plain"),
        pytest.param(
            bind_native_step,
            id="native",
            marks=pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built"),
        ),
    ],
)
MAX_DRAFTS = 4
Bind = Callable[[SlotTensors, LayoutTensors, StepTensors], BoundStep]


def _state(
    num_slots: int, length: int, *, blocks: dict[int, list[list[int]]] | None = None, seed: int | None = None
) -> SlotTensors:
    """blocks: by block size, the block table of every slot."""
    tokens = (
        np.zeros((num_slots, length))
        if seed is None
        else np.random.default_rng(seed).integers(0, 1000, (num_slots, length))
    )
    zeros = torch.zeros(num_slots, dtype=torch.int64)
    blocks = blocks or {4: [[0] * -(-length // 4)] * num_slots}
    return SlotTensors(
        torch.from_numpy(tokens.astype(np.int32)),
        zeros,
        zeros.clone(),
        zeros.clone(),
        tuple(torch.tensor(table, dtype=torch.int32) for table in blocks.values()),
        tuple(blocks),
        torch.zeros(num_slots, MAX_DRAFTS, dtype=torch.int32),
    )


def _buffers(state: SlotTensors) -> StepTensors:
    """For more tokens and rows than any step here has, filled with what must not be read."""
    num_tokens, num_rows = 64, 9
    return StepTensors(
        torch.full((num_tokens,), -7, dtype=torch.int32),
        torch.full((num_tokens,), -7),
        torch.full((num_rows,), -7, dtype=torch.int32),
        tuple(torch.full((num_rows, table.shape[1]), -7, dtype=torch.int32) for table in state.block_tables_SB),
        tuple(torch.full((num_tokens,), -7) for _ in state.block_sizes),
    )


def _layout(slots: list[int], counts: list[int], num_padding_tokens: int = 0) -> LayoutTensors:
    """One padding row, of the last slot, if there is padding."""
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    offsets = [offset for count in counts for offset in range(count)]
    padding_rows = [slots[-1]] if num_padding_tokens else []
    actual = slots[:-1] if num_padding_tokens else slots
    return LayoutTensors(
        _long(actual + padding_rows),
        _long(counts + [0] * len(padding_rows)),
        _long(rows + [len(actual)] * num_padding_tokens),
        _long(offsets + [0] * num_padding_tokens),
        len(actual),
        len(rows),
    )


def _long(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@IMPLEMENTATIONS
def test_slot_mapping_follows_each_groups_block_table_and_marks_padding(bind: Bind) -> None:
    state = _state(3, 16, blocks={4: [[0, 0, 0, 0], [7, 2, 9, 5], [0, 0, 0, 0]], 8: [[0, 0], [3, 6], [0, 0]]})
    state.num_computed_tokens_S[1] = 3
    step = bind(state, _layout([1, 2], [7], num_padding_tokens=1), _buffers(state))
    tensors = step.gather((3, 2))
    assert tensors.positions_T[:7].tolist() == [3, 4, 5, 6, 7, 8, 9]
    small, large = tensors.slot_mappings_T
    assert small.tolist() == [31, 8, 9, 10, 11, 36, 37, -1]
    assert large.tolist() == [27, 28, 29, 30, 31, 48, 49, -1]
    assert [table.tolist() for table in tensors.block_tables_RB] == [[[7, 2, 9], [0, 0, 0]], [[3, 6], [0, 0]]]


@IMPLEMENTATIONS
def test_chunked_prefill_advances_as_in_the_worked_trace(bind: Bind) -> None:
    state = _state(2, 32)
    state.all_token_ids_SL[0, :10] = torch.arange(100, 110)
    state.total_len_S[0] = state.prefill_len_S[0] = 10
    expected = [
        # scheduled, positions, seq_len, num_sampled, computed after, total_len after
        (4, [0, 1, 2, 3], 4, 0, 4, 10),
        (4, [4, 5, 6, 7], 8, 0, 8, 10),
        (2, [8, 9], 10, 1, 10, 11),
        (1, [10], 11, 1, 11, 12),
    ]
    sampled_token = 500
    for scheduled, positions, seq_len, num_sampled, computed_after, total_after in expected:
        step = bind(state, _layout([0], [scheduled]), _buffers(state))
        inputs = step.gather((8,))
        assert inputs.positions_T.tolist() == positions
        assert inputs.seq_lens_R.tolist() == [seq_len]
        assert inputs.input_ids_T.tolist() == [int(state.all_token_ids_SL[0, position]) for position in positions]
        outcome, on_host = step.outcome(_long([sampled_token]), torch.tensor([False]))
        assert outcome.table_RX.tolist() == [[sampled_token, num_sampled, 0, 0]]
        assert on_host in (None, ([[sampled_token] if num_sampled else []], None))
        step.advance(outcome)
        assert state.num_computed_tokens_S.tolist()[0] == computed_after
        assert state.total_len_S.tolist()[0] == total_after
        sampled_token += 1
    assert state.all_token_ids_SL[0, :13].tolist() == [*range(100, 110), 502, 503, 0]


@IMPLEMENTATIONS
def test_a_bound_step_goes_on_for_as_many_steps_as_the_layout_lasts(bind: Bind) -> None:
    """Two requests decode; the tables' columns grow with them, and what a step counted stays as it was."""
    state = _state(3, 16, blocks={4: [[5, 6, 7, 8], [1, 2, 3, 4], [0, 0, 0, 0]]})
    for slot, total in ((0, 5), (1, 9)):
        state.total_len_S[slot] = state.prefill_len_S[slot] = total
        state.num_computed_tokens_S[slot] = total - 1
    step = bind(state, _layout([1, 0], [1, 1]), _buffers(state))
    outcomes = []
    for number in range(5):
        columns = (9 + number + 3) // 4
        inputs = step.gather((columns,))
        assert inputs.positions_T.tolist() == [8 + number, 4 + number]
        assert inputs.input_ids_T.tolist() == ([0, 0] if number == 0 else [100 + number - 1, 200 + number - 1])
        assert inputs.block_tables_RB[0].tolist() == [[1, 2, 3, 4][:columns], [5, 6, 7, 8][:columns]]
        blocks = [[1, 2, 3, 4][(8 + number) // 4], [5, 6, 7, 8][(4 + number) // 4]]
        assert inputs.slot_mappings_T[0].tolist() == [blocks[0] * 4 + number % 4, blocks[1] * 4 + number % 4]
        failures = _long([0, 2]) if number % 2 else torch.tensor([False, True])
        outcome, on_host = step.outcome(_long([100 + number, 200 + number]), failures)
        step.advance(outcome)
        assert outcome.table_RX.tolist() == [[100 + number, 1, 0, 0], [200 + number, 1, 0, 2 if number % 2 else 1]]
        outcomes.append((outcome, on_host))
        assert (state.num_computed_tokens_S[:2] == state.total_len_S[:2] - 1).all()
    for number, (outcome, on_host) in enumerate(outcomes):
        if on_host is None:
            assert outcome.table_RX.tolist() == [[100 + number, 1, 0, 0], [200 + number, 1, 0, 2 if number % 2 else 1]]
        else:
            assert on_host == ([[100 + number], [200 + number]], [0, 2 if number % 2 else 1])


@IMPLEMENTATIONS
@settings(max_examples=50, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=5),
    data=st.data(),
)
def test_inputs_equal_a_restatement_in_python(bind: Bind, requests: list[tuple[int, int]], data: st.DataObject) -> None:
    state = _state(8, 32, seed=0)
    slots = data.draw(st.permutations(range(8)))[: len(requests)]
    for slot, (num_computed, _) in zip(slots, requests, strict=True):
        state.num_computed_tokens_S[slot] = num_computed
    counts = [count for _, count in requests]
    inputs = bind(state, _layout(list(slots), counts), _buffers(state)).gather((8,))
    positions = [start + offset for start, count in requests for offset in range(count)]
    owners = [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
    assert inputs.positions_T.tolist() == positions
    tokens = state.all_token_ids_SL
    assert inputs.input_ids_T.tolist() == [int(tokens[o, p]) for o, p in zip(owners, positions, strict=True)]
    assert inputs.seq_lens_R.tolist() == [start + count for start, count in requests]


@dataclass
class _Drafted:
    """One request of a step: what it knows and runs, what is drafted, and what its logits rows say, and fail with."""

    known: list[int]
    prefill_len: int
    num_computed: int
    count: int
    drafts: list[int]
    is_checked: bool
    sampled: list[int]
    failures: list[int]

    def expected(self) -> tuple[list[int], int, int]:
        """Sampled tokens, rejected drafts, failure: one row after the other, as a run without drafts would have it."""
        tokens = []
        if self.num_computed + self.count - len(self.drafts) >= self.prefill_len:
            for row, token in enumerate(self.sampled):
                if row > 0 and self.failures[row]:
                    break
                tokens.append(token)
                if self.failures[row] or row == len(self.drafts) or token != self.drafts[row]:
                    break
        return tokens, len(self.drafts) - max(0, len(tokens) - 1), self.failures[0]


@st.composite
def _drafted(draw: st.DrawFn) -> _Drafted:
    known = draw(st.lists(st.integers(100, 200), min_size=1, max_size=12))
    is_chunk = draw(st.booleans())
    few = st.integers(0, 2)
    drafts = [] if is_chunk else draw(st.lists(st.integers(-1, 2), max_size=MAX_DRAFTS))
    num_computed = draw(st.integers(0, len(known) - 1)) if is_chunk else len(known) - 1
    count = draw(st.integers(1, len(known) - num_computed)) if is_chunk else 1 + len(drafts)
    is_checked = draw(st.booleans())
    num_rows = 1 + len(drafts) * is_checked
    rows = st.lists(few, min_size=num_rows, max_size=num_rows)
    failures = draw(st.lists(st.sampled_from([0, 0, 0, 0, 1, 2]), min_size=num_rows, max_size=num_rows))
    prefill_len = len(known) if is_chunk else draw(st.integers(1, len(known)))
    return _Drafted(known, prefill_len, num_computed, count, drafts, is_checked, draw(rows), failures)


@IMPLEMENTATIONS
@settings(max_examples=150, deadline=None)
@given(requests=st.lists(_drafted(), min_size=1, max_size=6), order=st.permutations(range(8)))
# The row after a draft that was sampled fails: the draft is not accepted.
@example(requests=[_Drafted([100, 101], 2, 1, 3, [1, 2], True, [1, 2, 0], [0, 1, 0])], order=list(range(8)))
def test_drafts_are_read_verified_and_recorded_as_one_after_the_other(
    bind: Bind, requests: list[_Drafted], order: list[int]
) -> None:
    state = _state(8, 20, seed=1)
    slots = order[: len(requests)]
    for slot, each in zip(slots, requests, strict=True):
        state.all_token_ids_SL[slot, : len(each.known)] = torch.tensor(each.known)
        state.total_len_S[slot], state.prefill_len_S[slot] = len(each.known), each.prefill_len
        state.num_computed_tokens_S[slot] = each.num_computed
        state.draft_token_ids_SD[slot, : len(each.drafts)] = torch.tensor(each.drafts, dtype=torch.int32)
    before = state.all_token_ids_SL.clone()
    num_rows = [len(each.sampled) for each in requests]
    layout = _layout(slots, [each.count for each in requests])._replace(
        drafts=DraftTensors(
            _long([len(each.drafts) for each in requests]),
            _long([len(each.drafts) * each.is_checked for each in requests]),
            _long([sum(num_rows[:row]) for row in range(len(requests))]),
            max(len(each.drafts) for each in requests),
        )
    )
    step = bind(state, layout, _buffers(state))
    ids = step.gather((5,)).input_ids_T.tolist()
    # A draft that is none runs as some token.
    assert ids == [
        max(token, 0)
        for each in requests
        for token in [*each.known, *each.drafts][each.num_computed : each.num_computed + each.count]
    ]
    outcome, on_host = step.outcome(
        _long([token for each in requests for token in each.sampled]),
        _long([failure for each in requests for failure in each.failures]),
    )
    expected = [each.expected() for each in requests]
    failures = [failure for _, _, failure in expected]
    assert outcome.num_sampled.tolist() == [len(tokens) for tokens, _, _ in expected]
    assert outcome.num_rejected.tolist() == [num_rejected for _, num_rejected, _ in expected]
    assert outcome.failures.tolist() == failures
    rows = zip(outcome.sampled_token_ids.tolist(), outcome.num_sampled.tolist(), strict=True)
    assert [row[:count] for row, count in rows] == [tokens for tokens, _, _ in expected]
    assert on_host in (None, ([tokens for tokens, _, _ in expected], failures if any(failures) else None))

    step.advance(outcome)
    for slot, each, (tokens, num_rejected, _) in zip(slots, requests, expected, strict=True):
        known = [*each.known, *tokens]
        assert state.all_token_ids_SL[slot, : len(known)].tolist() == known
        assert int(state.total_len_S[slot]) == len(known)
        assert int(state.num_computed_tokens_S[slot]) == each.num_computed + each.count - num_rejected
    others = [slot for slot in range(8) if slot not in slots]
    assert torch.equal(state.all_token_ids_SL[others], before[others])


def test_without_the_cpp_kernels_torch_steps_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.kernels.step_state.bind_native_step", lambda *arguments: None)
    monkeypatch.setattr("penstock.kernels.step_state.triton_runs", lambda tensor: False)
    state = _state(2, 8)
    step = bind_step(state, _layout([0], [1]), _buffers(state))
    assert isinstance(step, PlainStep)
    assert step.gather((1,)).positions_T.tolist() == [0]
