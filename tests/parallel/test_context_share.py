"""Positions of each decode-context-parallel rank, against a list of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UnsupportedFeature
from penstock.parallel import Group, ParallelState
from penstock.parallel.context_share import ContextShare, context_share


@dataclass(frozen=True)
class Place:
    """Fake group: rank and size."""

    rank: int
    size: int


def share(rank: int, size: int, interleave: int) -> ContextShare:
    return ContextShare(cast(Group, Place(rank, size)), interleave)


@given(size=st.integers(2, 4), interleave=st.integers(1, 4), runs=st.integers(1, 3), length=st.integers(0, 60))
def test_positions_are_kept_by_turns(size: int, interleave: int, runs: int, length: int) -> None:
    page = interleave * runs
    block_size, blocks = page * size, np.random.default_rng(length).permutation(60) + 1
    slots = np.array([blocks[p // block_size] * block_size + p % block_size for p in range(length)], dtype=np.int64)
    taken: list[int] = []
    for rank in range(size):
        mine = [p for p in range(length) if p // interleave % size == rank]
        part = share(rank, size, interleave)
        own, here = part.slots(slots, block_size)
        assert own.tolist() == mine
        # The n-th position here is the n-th of the rank's pages.
        assert here.tolist() == [int(blocks[n // page]) * page + n % page for n in range(len(mine))]
        assert part.num_kept(np.arange(length + 1)).tolist() == [
            sum(p < end for p in mine) for end in range(length + 1)
        ]
        taken += own.tolist()
    assert sorted(taken) == list(range(length))


@pytest.mark.parametrize(("num_kv_heads", "context", "sizes"), [(2, 4, "1, 2"), (8, 2, "1"), (4, 2, "1"), (3, 2, "1")])
def test_ranks_with_other_kv_heads_cannot_share_positions(num_kv_heads: int, context: int, sizes: str) -> None:
    parallel = ParallelState(tensor=cast(Group, Place(0, 4)), context=cast(Group, Place(0, context)))
    with pytest.raises(UnsupportedFeature, match=rf"decode_context_parallel_size={context}.*Sizes that can: {sizes}\."):
        context_share(num_kv_heads, parallel)


def test_ranks_with_the_same_kv_heads_share_positions() -> None:
    parallel = ParallelState(tensor=cast(Group, Place(0, 4)), context=cast(Group, Place(0, 2)), interleave=8)
    assert context_share(2, parallel) == ContextShare(parallel.context, 8)
    assert context_share(2, ParallelState(tensor=parallel.tensor)) is None
