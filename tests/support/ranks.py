"""Several ranks in one process, one thread each, with real collectives."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.device.anonymous_memory import create_shared_memory
from penstock.parallel import Group, ParallelState
from penstock.parallel.shared_memory import SharedMemory
from penstock.parallel.shared_memory_group import SharedMemoryGroup, group_bytes

_Result = TypeVar("_Result")
_WAIT_S = 30.0


class SilentGroup(Group):
    """Group of a rank that must not communicate."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather_values(self, value: Any, value_type: Any = Any) -> list[Any]:
        raise AssertionError("this rank has no peers")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.gather_values(tensor)  # type: ignore[return-value]

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return self.gather_values(tensor)  # type: ignore[return-value]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return self.gather_values(tensor)  # type: ignore[return-value]

    def send(self, tensor: Tensor, destination: int) -> None:
        self.gather_values(tensor)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        return self.gather_values(tensor)  # type: ignore[return-value]


class SharedGroup:
    """Exchange of tensors that the ranks of a group share."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.sent: dict[tuple[int, int], queue.Queue[Tensor]] = {
            (source, destination): queue.Queue() for source in range(size) for destination in range(size)
        }


class ThreadGroup(Group):
    """Group of one rank over a `SharedGroup`."""

    def __init__(self, rank: int, shared: SharedGroup) -> None:
        self.rank, self.size = rank, len(shared.values)
        self._shared = shared

    def gather_values(self, value: Any, value_type: Any = Any) -> list[Any]:
        shared = self._shared
        shared.values[self.rank] = value
        shared.barrier.wait(_WAIT_S)
        values = list(shared.values)
        shared.barrier.wait(_WAIT_S)
        return values

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.gather_values(tensor)).sum(0)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        # A rank that has all tensors may change its own while other ranks have yet to read it.
        return torch.cat(self.gather_values(tensor.clone()), dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        result = self.gather_values(tensor)[source]
        assert isinstance(result, Tensor)
        return result

    def send(self, tensor: Tensor, destination: int) -> None:
        self._shared.sent[self.rank, destination].put(tensor.clone())

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        return tensor.copy_(self._shared.sent[source, self.rank].get(timeout=_WAIT_S))


def shared_memory_groups(size: int, **options: Any) -> list[SharedMemoryGroup]:
    """Shared-memory groups of ranks with a mapping each, as processes have."""
    descriptor = create_shared_memory(group_bytes(size))
    try:
        return [SharedMemoryGroup(rank, size, SharedMemory(descriptor), **options) for rank in range(size)]
    finally:
        os.close(descriptor)


def contexts(size: int) -> list[ParallelState]:
    """Parallel states of tensor parallel ranks, by rank."""
    shared = SharedGroup(size)
    return [ParallelState(rank=rank, world_size=size, tensor=ThreadGroup(rank, shared)) for rank in range(size)]


def run_ranks(size: int, run: Callable[[int], _Result]) -> list[_Result | BaseException]:
    """Result or exception of `run(rank)` for each rank, in a thread each."""
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = run(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
