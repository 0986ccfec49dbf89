"""Ranks that are processes of one machine."""

from __future__ import annotations

from penstock.device.limits import usable_cores
from penstock.parallel.agreement import GroupAgreement
from penstock.parallel.context import ParallelContext
from penstock.parallel.shared_memory import SharedMemory, create_shared_memory
from penstock.parallel.shared_memory_group import GROUP_TIMEOUT_S, SPIN_US, SharedMemoryGroup, group_bytes


def share_memory(num_ranks: int) -> int:
    """What so many ranks meet in: a descriptor for each of their processes, which the caller closes after that."""
    return create_shared_memory(group_bytes(num_ranks) if num_ranks > 1 else 1)


def join_local_ranks(
    rank: int, num_ranks: int, memory_descriptor: int, timeout_s: float = GROUP_TIMEOUT_S
) -> ParallelContext:
    """This process's place among ranks that split every layer.

    memory_descriptor: of `share_memory`. timeout_s: how long they wait for each other.
    """
    if num_ranks == 1:
        return ParallelContext()
    # A rank that waits on the core of the one that it waits for only keeps it from coming.
    spin_us = SPIN_US if usable_cores() >= num_ranks else 0
    group = SharedMemoryGroup(rank, num_ranks, SharedMemory(memory_descriptor), timeout_s=timeout_s, spin_us=spin_us)
    return ParallelContext(rank=rank, world_size=num_ranks, tensor=group, agreement=GroupAgreement(group))
