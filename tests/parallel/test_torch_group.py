"""Collectives over gloo equal the operation on whole tensors; a missing rank is named."""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from penstock.config.parallel import ParallelConfig
from penstock.contract import FullAttentionSpec, KVCacheSpec, SchedulerOutput
from penstock.errors import RanksDisagree, UnsupportedFeature, WaitTimeout, WorkerError
from penstock.parallel import GroupAgreement, StepFacts
from penstock.parallel.connections import RankConnections, address_towards, open_store
from penstock.parallel.distributed_ranks import join_connected_ranks
from penstock.parallel.local_ranks import join_local_ranks, share_memory
from penstock.parallel.nccl_group import NcclGroup
from penstock.parallel.torch_group import _LONG, TorchGroup
from support.ranks import run_ranks
from support.waiting import PATIENCE_S, wait_until

SIZES = (2, 3)
# Nothing; a few numbers; so many that each of three ranks adds up a share, which do not divide.
SHAPES = ((0, 4), (1, 1), (3, 5), (2, _LONG // 2 + 1))
HOST = "127.0.0.1"


def connect(size: int, timeout_s: float = 30.0) -> list[RankConnections]:
    store = open_store(HOST, 0, is_host=True)

    def one(rank: int) -> RankConnections:
        theirs = store if rank == 0 else open_store(HOST, store.port, is_host=False)
        return RankConnections(theirs, rank, size, address=HOST, timeout_s=timeout_s)

    connections = run_ranks(size, one)
    assert all(isinstance(found, RankConnections) for found in connections), connections
    return connections  # type: ignore[return-value]


def together(size: int, run: Callable[[TorchGroup], Any], timeout_s: float = 30.0) -> list[Any]:
    connections = connect(size, timeout_s)
    try:
        return run_ranks(size, lambda rank: run(TorchGroup(connections[rank], range(size), 0)))
    finally:
        for one in connections:
            one.close()


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).mul_(100).to(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_collectives_are_numpys(size: int) -> None:
    def run(group: TorchGroup) -> list[torch.Tensor]:
        found = []
        for shape in SHAPES:
            own = of_rank(group.rank, shape)
            found += [group.all_reduce(own.clone()), group.all_gather(own, 0), group.all_gather(own.T, -1)]
            found += [group.broadcast(own.clone(), size - 1)]
            found += [group.reduce_scatter(own.repeat(1, size), 1)]
        return found

    each = [[of_rank(rank, shape).numpy() for rank in range(size)] for shape in SHAPES]
    for rank, found in enumerate(together(size, run)):
        expected: list[np.ndarray] = []
        for arrays in each:
            total = arrays[0]
            for other in arrays[1:]:
                total = total + other
            expected += [total, np.concatenate(arrays), np.concatenate([array.T for array in arrays], -1)]
            expected += [arrays[-1], total]
        assert len(found) == len(expected), found
        for ours, theirs in zip(found, expected, strict=True):
            assert np.array_equal(ours.numpy(), theirs), rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_sums_have_the_bits_of_ranks_that_share_memory(dtype: torch.dtype) -> None:
    size = 3
    config = ParallelConfig(tensor_parallel_size=size)
    descriptor = share_memory(config)
    local = [join_local_ranks(rank, config, descriptor).tensor for rank in range(size)]
    os.close(descriptor)
    given = [[of_rank(10 * rank, shape, dtype) for shape in SHAPES] for rank in range(size)]

    def reduce(group: Any) -> list[torch.Tensor]:
        return [group.all_reduce(tensor.clone()) for tensor in given[group.rank]]

    expected = run_ranks(size, lambda rank: reduce(local[rank]))
    for ours, theirs in zip(together(size, reduce), expected, strict=True):
        assert all(map(torch.equal, ours, theirs))  # type: ignore[arg-type]


class GlooForNccl:
    """Fake of torch's NCCL process group, over gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._gloo = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)


def test_groups_of_gpus_ask_nccl_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", GlooForNccl, raising=False)
    connections = connect(2)

    def run(rank: int) -> list[torch.Tensor]:
        context = join_connected_ranks(connections[rank], ParallelConfig(tensor_parallel_size=2), torch.device("cpu"))
        group, own = context.tensor, of_rank(rank, (4, 6))
        if rank == 0:
            group.send(own, 1)
        received = group.receive(torch.empty(4, 6), 0) if rank == 1 else own
        assert group.gather_values(rank) == [0, 1]
        made = [group.all_reduce(own.clone()), group.reduce_scatter(own, 1), group.all_gather(own, 1)]
        return [*made, group.all_gather(own.T, 0), group.broadcast(own.clone(), 1), received]

    first, second = of_rank(0, (4, 6)), of_rank(1, (4, 6))
    for rank, found in enumerate(run_ranks(2, run)):
        expected = [first + second, (first + second).chunk(2, 1)[rank], torch.cat([first, second], 1)]
        expected += [torch.cat([first.T, second.T]), second, first]
        assert all(map(torch.equal, found, expected)), found  # type: ignore[arg-type]
    for one in connections:
        one.close()


def test_gpus_need_a_torch_that_lets_them_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", None, raising=False)
    (alone,) = connect(1)
    with pytest.raises(UnsupportedFeature, match="by NCCL, without which this torch"):
        NcclGroup(alone, [0], 0, torch.device("cuda", 0), 1.0)
    alone.close()


def test_a_torch_whose_gloo_cannot_be_told_where_to_listen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed.ProcessGroupGloo, "_Options")
    store = open_store(HOST, 0, is_host=True)
    with pytest.raises(UnsupportedFeature, match=r"has no options of gloo .*_Options.*, by which ranks"):
        RankConnections(store, 0, 1, address=HOST, timeout_s=1.0)


def test_values_of_any_size_are_gathered_and_ranks_may_be_late() -> None:
    values = [{"rank": rank, "text": "ä" * (length * rank)} for length in (0, 200, 10**5) for rank in range(3)]

    def run(group: TorchGroup) -> list[Any]:
        found = []
        for number in range(0, len(values), 3):
            time.sleep(0.01 * ((group.rank + number) % 3))
            found += group.gather_values(values[number + group.rank])
        return found

    assert together(3, run) == [values] * 3


class RunsCode:
    """Bytes whose unpickling writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "ran")


def test_bytes_of_a_stranger_run_no_code_and_its_rank_is_named(tmp_path: Path) -> None:
    sent = pickle.dumps(RunsCode(tmp_path / "ran"))

    def run(group: TorchGroup) -> str:
        if group.rank == 1:
            head = len(sent).to_bytes(8, "little") + sent[:248]
            group._gather_bytes(head.ljust(256, b"\0"))
            return ""
        with pytest.raises(RanksDisagree) as failure:
            group.gather_values(StepFacts(1, 2, 3), StepFacts)
        return str(failure.value)

    assert len(sent) <= 248
    said, _ = together(2, run)
    assert f"Rank 1 sent {len(sent)} bytes that are no StepFacts" in said
    assert not (tmp_path / "ran").exists()


def test_values_of_a_type_come_back_as_that_type() -> None:
    specs = {"layers.0": FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float32")}
    found = together(2, lambda group: group.gather_values(specs, dict[str, KVCacheSpec]))
    assert found == [[specs] * 2] * 2


def test_stages_of_split_layers_talk_in_the_groups_of_each() -> None:
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    connections = connect(4)
    contexts = [join_connected_ranks(one, config) for one in connections]
    assert [(c.pipeline.rank, c.tensor.rank) for c in contexts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # Nothing; more than may be on its way to one who has not come; a few.
    sent = [of_rank(number, shape) for number, shape in enumerate([(0, 4), (2, 1 << 20), (7,), (7,)])]

    def run(rank: int) -> Any:
        tensor, pipeline = contexts[rank].tensor, contexts[rank].pipeline
        if pipeline.rank == 0:
            for given in sent:
                buffer = given.clone()
                pipeline.send(buffer, 1)
                buffer.zero_()
        in_stage = tensor.gather_values(rank)
        received = [pipeline.receive(torch.empty_like(given), 0) for given in sent] if pipeline.rank == 1 else []
        return in_stage, all(map(torch.equal, sent, received))

    assert run_ranks(4, run) == [([0, 1], True), ([0, 1], True), ([2, 3], True), ([2, 3], True)]
    for one in connections:
        one.close()


def test_small_tensors_are_sent_before_anybody_receives() -> None:
    connections = connect(2)
    first, second = (TorchGroup(one, range(2), 1) for one in connections)
    for number in range(3):
        first.send(torch.tensor([number]), 1)
    assert [second.receive(torch.empty(1, dtype=torch.int64), 0).item() for _ in range(3)] == [0, 1, 2]
    for one in connections:
        one.close()


def test_what_is_asked_for_comes_before_it_is_waited_for() -> None:
    connections = connect(2, timeout_s=20.0)
    first, second = (TorchGroup(one, range(2), 1) for one in connections)
    # More than may be on its way to one who has not asked.
    sent = of_rank(0, (5, 1 << 18))
    small, large = torch.zeros(3), torch.zeros_like(sent)
    waits = [second.start_receiving(small, 0), second.start_receiving(large, 0)]
    first.send(torch.ones(3), 1)
    first.send(sent, 1)
    # It has returned, so it was taken, though no rank waits for it.
    received = [wait() for wait in waits]
    assert received[0] is small
    assert torch.equal(small, torch.ones(3))
    assert torch.equal(received[1], sent)
    for one in connections:
        one.close()


def test_others_see_who_waits() -> None:
    connections = connect(2)
    first, second = (TorchGroup(one, range(2), 1) for one in connections)
    waiting = threading.Thread(target=lambda: first.receive(torch.zeros(3), 1))
    waiting.start()
    wait_until(lambda: connections[0].is_waiting, "it waits")
    assert (connections[0].is_waiting, connections[1].is_waiting) == (True, False)
    second.send(torch.zeros(3), 0)
    waiting.join(20)
    assert not connections[0].is_waiting
    for one in connections:
        one.close()


def test_who_does_not_send_what_is_asked_for_is_named_by_which_one_waits() -> None:
    def run(group: TorchGroup) -> None:
        if group.rank == 1:
            wait = group.start_receiving(torch.zeros(3), 0)
            group.note_step(4)
            with pytest.raises(WaitTimeout, match=r"Rank 1 waited 0.4 s in receive .*, step 4 for rank 0"):
                wait()

    assert together(2, run, timeout_s=0.4) == [None, None]


def give_grace(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """To ranks that tell each other for whom they wait, though their limits are short: they may get no turn so soon."""
    for name in ("_LEAST_GRACE_S", "_MOST_GRACE_S"):
        monkeypatch.setattr(f"penstock.parallel.connections.{name}", seconds)


@pytest.mark.parametrize(
    ("other", "theirs"),
    [
        (lambda group: group.all_gather(torch.zeros(4), 0), r"all_gather \(call 2 of its group of 2"),
        (lambda group: group.all_reduce(torch.zeros(5)), r"all_reduce \(call 2 of its group of 2"),
        (lambda group: group.receive(torch.zeros(5), 0), r"receive from rank 0 \(message 1 of its group of 2"),
    ],
)
def test_ranks_in_different_calls_are_told_with_the_step(
    other: Callable[[TorchGroup], Any], theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo would end the process where sizes differ."""
    give_grace(monkeypatch, 20.0)

    def run(group: TorchGroup) -> None:
        group.all_reduce(torch.zeros(3))
        group.note_step(17)
        group.all_reduce(torch.zeros(4)) if group.rank == 0 else other(group)

    for rank, error in enumerate(together(2, run, timeout_s=1.5)):
        assert isinstance(error, RanksDisagree)
        calls = r"all_reduce \(call 2 of its group of 2", theirs
        assert re.search(rf"Rank {rank} is in {calls[rank]}\), step 17, while rank {1 - rank} is in", str(error)), error


def test_a_rank_that_does_not_come_is_named_by_those_that_wait_for_others_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits for 2, and 0 for 1."""
    give_grace(monkeypatch, 2.0)
    all_ranks = threading.Barrier(3)

    def run(group: TorchGroup) -> None:
        if group.rank == 2:
            all_ranks.wait(PATIENCE_S)
            return
        begin = time.monotonic()
        with pytest.raises(WaitTimeout, match=rf"Rank {group.rank} waited 1.5 s in receive from .* for rank 2, which"):
            group.receive(torch.zeros(3), group.rank + 1)
        assert time.monotonic() - begin >= 1.3
        with pytest.raises(RanksDisagree, match=rf"cannot go on in broadcast .*, after this: Rank {group.rank} waited"):
            group.broadcast(torch.zeros(3))
        all_ranks.wait(PATIENCE_S)

    assert together(3, run, timeout_s=1.5) == [None] * 3


def test_engines_that_make_different_steps_are_told() -> None:
    steps = [
        SchedulerOutput(step_id=3, num_scheduled_tokens={"a": 1, "b": 1}, total_num_scheduled_tokens=2),
        SchedulerOutput(step_id=3, num_scheduled_tokens={"b": 1, "a": 1}, total_num_scheduled_tokens=2),
    ]

    def run(group: TorchGroup) -> None:
        GroupAgreement(group).on_step(steps[group.rank])
        GroupAgreement(group, compares_all=True).on_step(steps[0])
        GroupAgreement(group, compares_all=True).on_step(steps[group.rank])

    for error in together(2, run):
        assert isinstance(error, RanksDisagree)
        assert "Step 3: rank 1 runs step 3 with 2 tokens of 2 requests (" in str(error)


RANK = """
import sys, time, torch
from penstock.errors import PenstockError
from penstock.parallel.connections import RankConnections, open_store
from penstock.parallel.nccl_group import NcclGroup
from penstock.parallel.torch_group import TorchGroup

rank, size, port, timeout_s = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
store = open_store("127.0.0.1", port, is_host=False)
connections = RankConnections(store, rank, size, address="127.0.0.1", timeout_s=timeout_s)
group = TorchGroup(connections, range(size), 0)
group.note_step(5)
try:
    for number in range(10**6):
        assert group.all_reduce(torch.full((1000,), float(rank)))[0] == size * (size - 1) / 2
        if number == 10:
            print("runs", flush=True)
except PenstockError as error:
    print(type(error).__name__, str(error), flush=True)
"""


@pytest.mark.parametrize(
    ("how", "size", "victim", "said"),
    [
        (signal.SIGKILL, 2, 0, r"WorkerError Rank 1 lost rank 0 in all_reduce \(call \d+ .* of 2\), step 5: "),
        (signal.SIGKILL, 3, 1, r"WorkerError Rank [02] lost rank 1 in all_reduce \(call \d+ .* of 3\), step 5: "),
        (signal.SIGSTOP, 3, 2, r"WaitTimeout Rank [01] waited 4 s in all_reduce \(call \d+ .* step 5 for rank 2, "),
    ],
    ids=["killed, of 2", "killed, of 3", "stopped, of 3"],
)
@pytest.mark.one_case_quick
def test_who_is_killed_or_stopped_is_named_and_the_others_end_as_they_would(
    how: signal.Signals, size: int, victim: int, said: str
) -> None:
    store = open_store(HOST, 0, is_host=True)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, *map(str, (rank, size, store.port, 4.0))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["runs\n"] * size  # type: ignore[union-attr]
        ranks[victim].send_signal(how)
        for number, rank in enumerate(ranks):
            if number != victim:
                out, errors = rank.communicate(timeout=PATIENCE_S)
                assert re.search(said, out), (out, errors)
                # No abort of gloo's on the way out.
                assert (rank.returncode, errors) == (0, "")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_ranks_that_do_not_come_are_named() -> None:
    store = open_store(HOST, 0, is_host=True)
    with pytest.raises(WaitTimeout, match=r"Rank 1 waited 0.1 s at its start for rank 0, 2, of 3"):
        RankConnections(store, 1, 3, address=HOST, timeout_s=1, join_timeout_s=0.1)
    port = store.port
    del store
    with pytest.raises(WaitTimeout, match=rf"did not find the other ranks at {HOST}:{port} within 0.3 s"):
        open_store(HOST, port, is_host=False, timeout_s=0.3)


def test_closed_connections_leave_nothing_and_tell_the_others() -> None:
    def resources() -> tuple[int, int]:
        gc.collect()
        return psutil.Process().num_fds(), psutil.Process().num_threads()

    for one in connect(2):
        one.close()
    before = resources()
    connections = connect(2)
    first, second = (TorchGroup(one, range(2), 0) for one in connections)
    connections[0].close()
    with pytest.raises(RanksDisagree, match="its connections were closed"):
        first.all_reduce(torch.zeros(1))
    with pytest.raises(WorkerError, match="Rank 1 lost rank 0 in all_reduce"):
        second.all_reduce(torch.zeros(1))
    connections[1].close()
    del connections, first, second
    wait_until(lambda: all(now <= then for now, then in zip(resources(), before, strict=True)), "all is given back")


def test_the_address_of_this_machine_is_the_one_towards_the_other() -> None:
    assert address_towards("127.0.0.1", 80) == "127.0.0.1"
