"""Ranks that are processes of one machine."""

from __future__ import annotations

from penstock.config.parallel import ParallelConfig
from penstock.device.limits import usable_cores
from penstock.parallel.agreement import GroupAgreement
from penstock.parallel.context import ParallelContext
from penstock.parallel.group import ONE_RANK, Group
from penstock.parallel.shared_memory import SharedMemory, create_shared_memory
from penstock.parallel.shared_memory_group import SPIN_US, SharedMemoryGroup, group_bytes

# Of the time for a step, how long ranks wait for each other: they say which one is missing before whoever waits for them
# all loses patience.
_SHARE_OF_STEP = 0.8


def share_memory(parallel: ParallelConfig) -> int:
    """What the ranks meet in: a descriptor for each of their processes, which the caller closes after that."""
    sizes = parallel.world_size, parallel.decode_context_parallel_size
    num_bytes = [group_bytes(size) if size > 1 else 0 for size in sizes]
    return create_shared_memory(max(1, num_bytes[0] + parallel.world_size // sizes[1] * num_bytes[1]))


def join_local_ranks(rank: int, parallel: ParallelConfig, memory_descriptor: int) -> ParallelContext:
    """This process's place among ranks that split every layer. memory_descriptor: of `share_memory`."""
    num_ranks = parallel.world_size
    if num_ranks == 1:
        return ParallelContext()
    # A rank that waits on the core of the one that it waits for only keeps it from coming.
    spin_us = SPIN_US if usable_cores() >= num_ranks else 0
    memory = SharedMemory(memory_descriptor)
    timeout_s = _SHARE_OF_STEP * parallel.step_timeout_s
    group = SharedMemoryGroup(rank, num_ranks, memory, timeout_s=timeout_s, spin_us=spin_us)
    context: Group = ONE_RANK
    size = parallel.decode_context_parallel_size
    if size > 1:
        offset = group_bytes(num_ranks) + rank // size * group_bytes(size)
        context = SharedMemoryGroup(rank % size, size, memory, offset=offset, timeout_s=timeout_s, spin_us=spin_us)
    return ParallelContext(
        rank=rank,
        world_size=num_ranks,
        tensor=group,
        context=context,
        min_scattered_tokens=parallel.sp_min_token_num if parallel.enable_sp else None,
        interleave=parallel.cp_kv_cache_interleave_size,
        agreement=GroupAgreement(group),
    )
