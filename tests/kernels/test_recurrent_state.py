"""Pages of recurrent states in a step: those of a loop over its tokens."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.recurrent_state import state_pages


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=4),
    num_padding=st.sampled_from([0, 0, 1, 3]),
    num_own=st.integers(1, 4),
    block_size=st.sampled_from([1, 2, 4, 16]),
    data=st.data(),
)
def test_each_state_has_the_page_of_its_position(
    requests: list[tuple[int, int]], num_padding: int, num_own: int, block_size: int, data: st.DataObject
) -> None:
    """requests: computed tokens of each, and those of the step. Padding tokens belong to a row of their own."""
    num_columns = num_own + 32 // block_size
    table: list[list[int]] = []
    for row, _ in enumerate(requests):
        snapshots = data.draw(
            st.lists(st.booleans(), min_size=num_columns - num_own, max_size=num_columns - num_own), label="snapshots"
        )
        first = 1 + 100 * row
        own = list(range(first, first + num_own))
        table.append([*own, *(first + 50 + index if taken else 0 for index, taken in enumerate(snapshots))])
    before, kept, shared = [], [], []
    for (computed, count), pages in zip(requests, table, strict=True):
        end = computed + count
        border = pages[num_own + computed // block_size - 1] if computed and computed % block_size == 0 else 0
        before.append(border or (pages[(computed - 1) % num_own] if computed else 0))
        for position in range(computed, end):
            kept.append(pages[position % num_own] if position >= end - num_own else 0)
            shared.append(pages[num_own + position // block_size] if (position + 1) % block_size == 0 else 0)
    counts = [count for _, count in requests]
    lengths = [computed + count for computed, count in requests]
    if num_padding:
        counts.append(num_padding)
        lengths.append(0)
        table.append([9] * num_columns)
    starts = [0, *itertools.accumulate(counts)]
    slots = [0] * (len(kept)) + [-1] * num_padding

    found = state_pages(
        torch.tensor(table, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(slots),
        num_own_blocks=num_own,
        block_size=block_size,
    )

    assert found.before_R.tolist()[: len(requests)] == before
    assert found.own_T.tolist() == kept + [0] * num_padding
    assert found.snapshots_T.tolist() == shared + [0] * num_padding
