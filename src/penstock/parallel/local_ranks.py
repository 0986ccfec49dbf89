"""Groups of ranks on one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from penstock.config.parallel import ParallelConfig
from penstock.device.anonymous_memory import create_shared_memory
from penstock.device.limits import usable_cores
from penstock.parallel.agreement import GroupAgreement
from penstock.parallel.group import ONE_RANK, Group
from penstock.parallel.shared_memory import SharedMemory
from penstock.parallel.shared_memory_group import (
    SPIN_US,
    SharedMemoryGroup,
    calls_of_ranks,
    group_bytes,
    waits_in_channels,
)
from penstock.parallel.state import ParallelState

# Returns the world ranks of all groups of one kind.
Kind: TypeAlias = Callable[[ParallelConfig], list[tuple[int, ...]]]
# Timeout of ranks for each other, as a share of `step_timeout_s`: they name the missing rank before the step times out.
SHARE_OF_STEP = 0.8


def share_memory(config: ParallelConfig) -> int:
    """Create the shared memory of all ranks; return its descriptor, which the caller passes on and closes."""
    _, num_bytes = _areas(config)
    return create_shared_memory(max(1, num_bytes))


def join_local_ranks(rank: int, config: ParallelConfig, memory_descriptor: int) -> ParallelState:
    """Join all groups of this rank. memory_descriptor: of `share_memory` for the same configuration."""
    if config.world_size == 1:
        return ParallelState()
    memory = SharedMemory(memory_descriptor)
    # With fewer cores than ranks, a spinning rank takes the core of the rank that it waits for.
    spin_us = SPIN_US if usable_cores() >= config.world_size else 0
    timeout_s = SHARE_OF_STEP * config.longest_step_s
    starts, _ = _areas(config)

    def join(kind: Kind, ranks: tuple[int, ...]) -> Group:
        rank_in_group, start = ranks.index(rank), starts[kind, ranks]
        return SharedMemoryGroup(rank_in_group, len(ranks), memory, start=start, timeout_s=timeout_s, spin_us=spin_us)

    return place_rank(rank, config, join)


def place_rank(rank: int, config: ParallelConfig, join: Callable[[Kind, tuple[int, ...]], Group]) -> ParallelState:
    """Return the parallel state of a rank. join: makes a group of this kind of several ranks."""

    def group_of(kind: Kind) -> Group:
        (ranks,) = (ranks for ranks in kind(config) if rank in ranks)
        return ONE_RANK if len(ranks) == 1 else join(kind, ranks)

    tensor, pipeline, context = map(group_of, KINDS)
    return ParallelState(
        rank=rank,
        world_size=config.world_size,
        tensor=tensor,
        pipeline=pipeline,
        pipeline_layers=config.pipeline_layers,
        context=context,
        min_scattered_tokens=config.sp_min_token_num if config.enable_sp else None,
        interleave=config.cp_kv_cache_interleave_size,
        # Stages run the same step at different times.
        agreement=GroupAgreement(tensor, (pipeline, context)),
    )


def ranks_behind(config: ParallelConfig, memory_descriptor: int) -> list[int]:
    """Return the ranks that the others wait for when all ranks wait.

    These have made fewer collective calls of a group than its other ranks, or have a message to send or receive, and
    wait in no point-to-point channel themselves.
    """
    starts, _ = _areas(config)
    if not starts:
        return []
    memory = SharedMemory(memory_descriptor)
    behind, waiting, awaited = set[int](), set[int](), set[int]()
    for (_, ranks), start in starts.items():
        calls = calls_of_ranks(memory.address + start, len(ranks))
        behind |= {rank for rank, count in zip(ranks, calls, strict=True) if count < max(calls)}
        waits = waits_in_channels(memory.address + start, len(ranks))
        waiting |= {ranks[who] for who, _ in waits}
        awaited |= {ranks[whom] for _, whom in waits}
    return sorted(behind - waiting or awaited - waiting or behind)


def _areas(config: ParallelConfig) -> tuple[dict[tuple[Kind, tuple[int, ...]], int], int]:
    """Return each group's offset in the shared memory, in bytes, and the bytes in all."""
    starts: dict[tuple[Kind, tuple[int, ...]], int] = {}
    end = 0
    for kind in KINDS:
        for ranks in kind(config):
            if len(ranks) > 1:
                starts[kind, ranks] = end
                end += group_bytes(len(ranks))
    return starts, end


def _tensor_groups(config: ParallelConfig) -> list[tuple[int, ...]]:
    """Tensor-parallel groups: the ranks of each pipeline stage."""
    return _neighbours(config.world_size, config.tensor_parallel_size)


def _context_groups(config: ParallelConfig) -> list[tuple[int, ...]]:
    """Decode-context-parallel groups: ranks with the same KV heads, whose positions are split among them."""
    return _neighbours(config.world_size, config.decode_context_parallel_size)


def _pipeline_groups(config: ParallelConfig) -> list[tuple[int, ...]]:
    """Pipeline groups: ranks with the same shard of each stage's layers, by stage."""
    size = config.tensor_parallel_size
    return [tuple(range(first, config.world_size, size)) for first in range(size)]


def _neighbours(num_ranks: int, size: int) -> list[tuple[int, ...]]:
    return [tuple(range(first, first + size)) for first in range(0, num_ranks, size)]


KINDS: tuple[Kind, ...] = (_tensor_groups, _pipeline_groups, _context_groups)
