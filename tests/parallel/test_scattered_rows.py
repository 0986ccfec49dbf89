"""Rows that are scattered over ranks, against the whole tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.parallel import ParallelState
from penstock.parallel.group import OneRank
from penstock.parallel.scattered_rows import ScatteredRows, parts_between_stages, scattered_rows


class Recorded(OneRank):
    """A rank of several, which are given the same: their sum is known, and what the others would give."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.of_others: list[Tensor] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor * self.size

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        gathered = list(self.of_others)
        gathered.insert(self.rank, tensor)
        return torch.cat(gathered, dim)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 6])
def test_rows_of_all_ranks_are_the_whole(num_tokens: int) -> None:
    whole_TD = torch.arange(num_tokens * 4, dtype=torch.float32).view(num_tokens, 4)
    groups = [Recorded(rank, 3) for rank in range(3)]
    rows = [ScatteredRows(group, num_tokens) for group in groups]
    own = [of_rank.own(whole_TD) for of_rank in rows]
    assert len({len(part) for part in own}) == 1
    assert len(own[0]) == -(-num_tokens // 3)
    for group, of_rank, part in zip(groups, rows, own, strict=True):
        group.of_others = [other for other in own if other is not part]
        assert torch.equal(of_rank.whole(part), whole_TD)
        assert torch.equal(of_rank.add_up(whole_TD), part * 3)


def test_small_steps_are_not_scattered() -> None:
    parallel = ParallelState(tensor=Recorded(0, 2), min_scattered_tokens=8)
    assert scattered_rows(parallel, 7) is None
    assert scattered_rows(parallel, 8) == ScatteredRows(parallel.tensor, 8)
    assert scattered_rows(ParallelState(tensor=parallel.tensor), 8) is None
    assert scattered_rows(ParallelState(min_scattered_tokens=1), 8) is None


def test_ranks_send_parts_where_a_group_says_so_of_what_all_have() -> None:
    def parts(num_tokens: int, *, least: int | None, sends_parts: bool, size: int = 3) -> ScatteredRows | None:
        pipeline = Recorded(0, 2)
        pipeline.sends_parts = sends_parts
        parallel = ParallelState(tensor=Recorded(0, size), pipeline=pipeline, min_scattered_tokens=least)
        return parts_between_stages(parallel, num_tokens)

    assert parts(7, least=None, sends_parts=False) is None
    sent = parts(7, least=None, sends_parts=True)
    assert sent is not None
    assert sent.num_own == 3
    assert parts(7, least=None, sends_parts=True, size=1) is None
    assert parts(7, least=8, sends_parts=True) is not None
    assert parts(8, least=8, sends_parts=True) is None
