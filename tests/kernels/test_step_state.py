"""The step's state kernels against the worked traces and a restatement in Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.native import NATIVE
from penstock.kernels.step_state import CPU, REFERENCE, StepStateKernels, step_state_kernels

IMPLEMENTATIONS = pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(REFERENCE, id="reference"),
        pytest.param(CPU, id="numpy"),
        pytest.param(
            step_state_kernels(torch.device("cpu")),
            id="native",
            marks=pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built"),
        ),
    ],
)


def _long(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@IMPLEMENTATIONS
def test_slot_mapping_follows_the_block_table_and_marks_padding(kernels: StepStateKernels) -> None:
    block_tables = torch.tensor([[7, 2, 9], [0, 0, 0]], dtype=torch.int32)
    positions = _long([3, 4, 5, 6, 7, 8, 9, 0])
    token_to_req = _long([0, 0, 0, 0, 0, 0, 0, 1])
    slots = kernels.compute_slot_mapping(block_tables, _long([0, 1]), token_to_req, positions, 4, num_actual_tokens=7)
    assert slots.tolist() == [31, 8, 9, 10, 11, 36, 37, -1]


@IMPLEMENTATIONS
def test_chunked_prefill_advances_as_in_the_worked_trace(kernels: StepStateKernels) -> None:
    tokens = torch.zeros(2, 32, dtype=torch.int32)
    tokens[0, :10] = torch.arange(100, 110)
    total_len, computed, prefill_len = _long([10, 0]), _long([0, 0]), _long([10, 0])
    idx = _long([0])
    expected = [
        # scheduled, positions, seq_len, num_sampled, computed after, total_len after
        (4, [0, 1, 2, 3], 4, 0, 4, 10),
        (4, [4, 5, 6, 7], 8, 0, 8, 10),
        (2, [8, 9], 10, 1, 10, 11),
        (1, [10], 11, 1, 11, 12),
    ]
    sampled_token = 500
    for scheduled, positions, seq_len, num_sampled, computed_after, total_after in expected:
        inputs = kernels.gather_step_inputs(
            tokens, computed, idx, _long([scheduled]), _long([0] * scheduled), _long(list(range(scheduled)))
        )
        assert inputs.positions_T.tolist() == positions
        assert inputs.seq_lens_R.tolist() == [seq_len]
        assert inputs.input_ids_T.tolist() == [int(tokens[0, position]) for position in positions]
        counted = kernels.count_sampled(inputs.seq_lens_R, prefill_len, idx)
        assert counted.tolist() == [num_sampled]
        kernels.advance_state(tokens, total_len, computed, idx, _long([sampled_token]), counted, _long([scheduled]))
        assert computed.tolist()[0] == computed_after
        assert total_len.tolist()[0] == total_after
        sampled_token += 1
    assert tokens[0, :13].tolist() == [*range(100, 110), 502, 503, 0]


@IMPLEMENTATIONS
def test_a_decoding_request_has_one_token_more_than_it_has_computed(kernels: StepStateKernels) -> None:
    tokens = torch.zeros(3, 16, dtype=torch.int32)
    total_len, computed = _long([5, 9, 0]), _long([4, 8, 0])
    for token in range(3):
        kernels.advance_state(
            tokens, total_len, computed, _long([1, 0]), _long([token, token]), _long([1, 1]), _long([1, 1])
        )
        assert (computed[:2] == total_len[:2] - 1).all()


@IMPLEMENTATIONS
def test_rejected_drafts_are_not_counted_as_computed(kernels: StepStateKernels) -> None:
    tokens = torch.zeros(1, 32, dtype=torch.int32)
    total_len, computed = _long([11]), _long([10])
    kernels.advance_state(tokens, total_len, computed, _long([0]), _long([7]), _long([1]), _long([4]), _long([3]))
    assert computed.tolist() == [11]


@IMPLEMENTATIONS
@settings(max_examples=50, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=5),
    data=st.data(),
)
def test_inputs_equal_a_restatement_in_python(
    kernels: StepStateKernels, requests: list[tuple[int, int]], data: st.DataObject
) -> None:
    num_slots, length = 8, 32
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, 1000, (num_slots, length)).astype(np.int32))
    slots = data.draw(st.permutations(range(num_slots)))[: len(requests)]
    computed = torch.zeros(num_slots, dtype=torch.int64)
    for slot, (num_computed, _) in zip(slots, requests, strict=True):
        computed[slot] = num_computed
    counts = [count for _, count in requests]
    inputs = kernels.gather_step_inputs(
        tokens,
        computed,
        _long(list(slots)),
        _long(counts),
        _long([index for index, count in enumerate(counts) for _ in range(count)]),
        _long([offset for count in counts for offset in range(count)]),
    )
    positions = [start + offset for start, count in requests for offset in range(count)]
    owners = [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
    assert inputs.positions_T.tolist() == positions
    assert inputs.input_ids_T.tolist() == [int(tokens[o, p]) for o, p in zip(owners, positions, strict=True)]
    assert inputs.seq_lens_R.tolist() == [start + count for start, count in requests]
