"""Collectives in shared memory equal the operation on whole tensors; a missing rank is named."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.config.parallel import ParallelConfig
from penstock.errors import RanksDisagree, UnsupportedFeature, WaitTimeout
from penstock.parallel.local_ranks import join_local_ranks, share_memory
from penstock.parallel.shared_memory_group import SLOT_BYTES, SharedMemoryGroup, waits_in_channels
from support.ranks import run_ranks, shared_memory_groups
from support.waiting import PATIENCE_S, wait_until

SIZES = (2, 3, 4)
# A few numbers; more than a rank gives at a time, and not a whole number of times.
SHAPES = ((0, 4), (1, 1), (3, 5), (2, SLOT_BYTES // 8 + 3))


def together(size: int, run: Callable[[SharedMemoryGroup], Any], **options: Any) -> list[Any]:
    ranks = shared_memory_groups(size, **options)
    return run_ranks(size, lambda rank: run(ranks[rank]))


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).mul_(100).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_sum_has_the_bits_of_adding_in_the_ranks_order(size: int, shape: tuple[int, ...]) -> None:
    expected = of_rank(0, shape)
    for rank in range(1, size):
        expected = expected + of_rank(rank, shape)
    # More often than there are places in memory.
    for sums in together(size, lambda group: [group.all_reduce(of_rank(group.rank, shape)) for _ in range(5)]):
        assert all(torch.equal(found, expected) for found in sums), sums


def test_narrow_numbers_are_rounded_once() -> None:
    given = [of_rank(rank, (7, 9), torch.bfloat16) for rank in range(3)]
    expected = ((given[0].float() + given[1].float()) + given[2].float()).to(torch.bfloat16)
    for found in together(3, lambda group: group.all_reduce(given[group.rank])):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.each_value_quick
def test_a_scattered_sum_is_each_ranks_share_of_the_sum(size: int, dim: int, dtype: torch.dtype) -> None:
    # Of the second, a rank's share of a row is more than there is room for at a time; the last has nothing.
    for shape in ((2 * size, 5 * size), (size, SLOT_BYTES // 4 // size * size + 6 * size), (size, 0)):
        given = [of_rank(rank, shape, dtype) for rank in range(size)]
        whole = together(size, lambda group, given=given: group.all_reduce(given[group.rank].clone()))[0]
        found = together(size, lambda group, given=given: group.reduce_scatter(given[group.rank], dim))
        length = whole.shape[dim] // size
        for rank in range(size):
            assert torch.equal(found[rank], whole.narrow(dim, rank * length, length)), (shape, rank, found[rank])
            assert torch.equal(given[rank], of_rank(rank, shape, dtype))
    strided = [of_rank(rank, (4, 2 * size)).T for rank in range(size)]
    expected = together(size, lambda group: group.all_reduce(strided[group.rank].clone()))[0]
    found = together(size, lambda group: group.reduce_scatter(strided[group.rank], 0))
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.each_value_quick
def test_gathered_tensors_are_side_by_side(size: int, dim: int, shape: tuple[int, ...]) -> None:
    expected = torch.cat([of_rank(rank, shape) for rank in range(size)], dim)
    for found in together(size, lambda group: group.all_gather(of_rank(group.rank, shape), dim)):
        assert torch.equal(found, expected)
    strided = torch.cat([of_rank(rank, shape).T for rank in range(size)], dim)
    for found in together(size, lambda group: group.all_gather(of_rank(group.rank, shape).T, dim)):
        assert torch.equal(found, strided)


@pytest.mark.parametrize("source", [0, 2])
def test_all_get_what_one_rank_gives(source: int) -> None:
    for found in together(3, lambda group: group.broadcast(of_rank(group.rank, SHAPES[-1]), source)):
        assert torch.equal(found, of_rank(source, SHAPES[-1]))


@pytest.mark.parametrize("length", [0, 200, 300, 10**6])
def test_values_of_any_size_are_gathered(length: int) -> None:
    values = [{"rank": rank, "text": "ä" * (length * rank)} for rank in range(3)]
    assert together(3, lambda group: group.gather_values(values[group.rank])) == [values] * 3


def test_calls_of_all_kinds_follow_each_other_on_ranks_that_are_late_in_turn() -> None:
    def run(group: SharedMemoryGroup) -> list[float]:
        found = []
        for number in range(60):
            if number % 3 == group.rank:
                time.sleep(0.002)
            own = torch.full((2, 3), float(group.rank + number))
            found.append(float(group.all_reduce(own.clone())[0, 0]))
            found.append(float(group.reduce_scatter(torch.cat([own] * 3), 0)[0, 0]))
            found.append(float(group.all_gather(own, 0).sum()))
            found.append(sum(group.gather_values(group.rank * number)))
        return found

    expected = [x for n in range(60) for x in (3.0 * n + 3, 3.0 * n + 3, 6 * (3.0 * n + 3), 3 * n)]
    for spin_us in (0, 200):
        assert together(3, run, spin_us=spin_us) == [expected] * 3


def test_a_rank_that_does_not_come_is_named_with_the_call() -> None:
    def run(group: SharedMemoryGroup) -> Any:
        group.all_reduce(torch.zeros(3))
        if group.rank == 1:
            return None
        begin = time.monotonic()
        with pytest.raises(WaitTimeout, match=rf"Rank {group.rank} waited 1 s in all_gather \(call 2 .* for rank 1,"):
            group.all_gather(torch.zeros(3), 0)
        assert time.monotonic() - begin >= 1
        with pytest.raises(RanksDisagree, match="cannot go on in broadcast"):
            group.broadcast(torch.zeros(3))
        return None

    assert together(3, run, timeout_s=1.0) == [None] * 3


def test_which_one_waits_long_sleeps() -> None:
    ranks = shared_memory_groups(2)
    waiting = threading.Thread(target=lambda: ranks[0].all_reduce(torch.zeros(1)))
    waiting.start()
    time.sleep(0.1)
    begin = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begin < 0.2
    ranks[1].all_reduce(torch.zeros(1))
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


@pytest.mark.parametrize(
    "other",
    [
        lambda group: group.all_gather(torch.zeros(4), 0),
        lambda group: group.all_reduce(torch.zeros(5)),
        lambda group: group.broadcast(torch.zeros(4)),
    ],
)
def test_ranks_in_different_calls_are_told(other: Callable[[SharedMemoryGroup], Any]) -> None:
    def run(group: SharedMemoryGroup) -> Any:
        return group.all_reduce(torch.zeros(4)) if group.rank == 0 else other(group)

    for rank, error in enumerate(together(2, run)):
        assert isinstance(error, RanksDisagree)
        assert f"while rank {1 - rank} makes another call" in str(error)


def test_ranks_without_the_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.parallel.shared_memory_group.collectives_library", lambda: None)
    with pytest.raises(UnsupportedFeature, match=r"C\+\+ kernels, which were not built"):
        shared_memory_groups(2)


def test_ranks_of_a_machine_have_a_group_and_one_alone_has_none() -> None:
    config = ParallelConfig(tensor_parallel_size=2)
    descriptor = share_memory(config)
    contexts = [join_local_ranks(rank, config, descriptor) for rank in range(2)]
    os.close(descriptor)
    assert [(context.rank, context.world_size, context.tensor.rank) for context in contexts] == [(0, 2, 0), (1, 2, 1)]
    sums = run_ranks(2, lambda rank: contexts[rank].tensor.all_reduce(torch.ones(2)))
    assert all(torch.equal(found, torch.full((2,), 2.0)) for found in sums)  # type: ignore[arg-type]
    alone = share_memory(ParallelConfig())
    assert join_local_ranks(0, ParallelConfig(), alone).tensor.size == 1
    os.close(alone)


def test_ranks_next_to_each_other_share_positions() -> None:
    parallel = ParallelConfig(tensor_parallel_size=4, decode_context_parallel_size=2, cp_kv_cache_interleave_size=8)
    descriptor = share_memory(parallel)
    contexts = [join_local_ranks(rank, parallel, descriptor) for rank in range(4)]
    os.close(descriptor)
    assert {context.interleave for context in contexts} == {8}

    def gather(rank: int) -> list[list[int]]:
        return [contexts[rank].context.gather_values(rank), contexts[rank].tensor.gather_values(rank)]

    everyone = [0, 1, 2, 3]
    assert run_ranks(4, gather) == [[[0, 1], everyone], [[0, 1], everyone], [[2, 3], everyone], [[2, 3], everyone]]


def test_stages_of_split_layers_have_groups_each_of_its_own() -> None:
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    descriptor = share_memory(config)
    contexts = [join_local_ranks(rank, config, descriptor) for rank in range(4)]
    os.close(descriptor)
    places = [(context.pipeline.rank, context.tensor.rank) for context in contexts]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]

    def run(rank: int) -> list[float]:
        tensor, pipeline = contexts[rank].tensor, contexts[rank].pipeline
        number = torch.tensor([float(rank)])
        in_stage = tensor.all_gather(number, 0).tolist()
        if pipeline.rank == 0:
            pipeline.send(number, 1)
            return in_stage
        return [*in_stage, *pipeline.receive(torch.empty(1), 0).tolist()]

    assert run_ranks(4, run) == [[0.0, 1.0], [0.0, 1.0], [2.0, 3.0, 0.0], [2.0, 3.0, 1.0]]


def test_what_is_sent_comes_whole_and_in_order() -> None:
    # Nothing; less than a piece; more than there is room for.
    sent = [of_rank(number, shape) for number, shape in enumerate([(0, 4), (3, 5), (2, 1 << 18), (7,)])]

    def run(group: SharedMemoryGroup) -> list[torch.Tensor]:
        if group.rank == 0:
            for tensor in sent:
                group.send(tensor, 1)
            return []
        return [group.receive(torch.empty_like(tensor), 0) for tensor in sent]

    for expected, found in zip(sent, together(2, run)[1], strict=True):
        assert torch.equal(expected, found)


def test_small_tensors_are_sent_before_anybody_receives() -> None:
    first, second = shared_memory_groups(2)
    for number in range(3):
        first.send(torch.tensor([number]), 1)
    assert [second.receive(torch.empty(1, dtype=torch.int64), 0).item() for _ in range(3)] == [0, 1, 2]


def test_a_tensor_of_another_size_and_one_that_does_not_come_are_errors() -> None:
    first, second = shared_memory_groups(2, timeout_s=0.05)
    first.send(torch.zeros(2), 1)
    with pytest.raises(RanksDisagree, match="rank 0 makes another call"):
        second.receive(torch.zeros(3), 0)
    with pytest.raises(WaitTimeout, match="receive from rank 1 .* for rank 1"):
        first.receive(torch.zeros(1), 1)


@pytest.mark.parametrize("is_full", [False, True])
def test_who_waits_for_a_message_and_for_whom_can_be_seen(is_full: bool) -> None:
    groups = shared_memory_groups(3, timeout_s=30.0)
    message = torch.zeros(1)
    waiting = threading.Thread(
        target=lambda: [groups[2].send(message, 1) for _ in range(9)] if is_full else groups[1].receive(message, 2)
    )

    def waits() -> list[tuple[int, int]]:
        return waits_in_channels(groups[0]._memory.address, 3)

    assert waits() == []
    waiting.start()
    wait_until(waits, "it waits")
    assert waits() == [(2, 1) if is_full else (1, 2)]
    if is_full:
        groups[1].receive(torch.zeros(1), 2)
    else:
        groups[2].send(message, 1)
    waiting.join()
    assert waits() == []
