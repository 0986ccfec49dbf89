"""Moves of blocks between the KV cache, host memory and a folder: messages between scheduler and workers."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from penstock.scheduler.block_pool import BlockKey


class Tier(IntEnum):
    """Place of a block. HOST: memory of `kv_offloading_size`. FOLDER: files of `kv_offload_dir`."""

    KV_CACHE = 0
    HOST = 1
    FOLDER = 2


class Move(NamedTuple):
    """Move of one block. move_id: unique in its core. block_id: in the KV cache; 0 for a move that does not touch it.

    pieces: of host memory; none for a move that does not touch it. is_beside_steps: of a save, which then takes as
    little from the steps as it can.
    """

    move_id: int
    source: Tier
    target: Tier
    key: BlockKey
    block_id: int = 0
    pieces: tuple[int, ...] = ()
    is_beside_steps: bool = False

    @property
    def is_load(self) -> bool:
        return self.target is Tier.KV_CACHE


class MoveResult(NamedTuple):
    """Result of a move on one rank. num_bytes: moved. error: why it failed; None where it is done.

    cost_s: seconds of CPU time of a save, on cores that the steps use; 0 where they use others. begun, ended: on this
    rank, in seconds of `time.monotonic`.
    """

    move_id: int
    num_bytes: int
    error: str | None = None
    cost_s: float = 0.0
    begun: float = 0.0
    ended: float = 0.0


class HostLayout(NamedTuple):
    """Host memory of one rank. num_pieces: of equal size. pieces_of_block: of a block, by KV cache group."""

    num_pieces: int
    pieces_of_block: tuple[int, ...]


class MoveQueue:
    """Moves that the workers have not been given yet, in their order."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self._next_id = 0

    def add(
        self,
        source: Tier,
        target: Tier,
        key: BlockKey,
        block_id: int,
        pieces: tuple[int, ...],
        *,
        is_beside_steps: bool = False,
    ) -> int:
        """Add a move; return its number, which is unique in its core."""
        move_id, self._next_id = self._next_id, self._next_id + 1
        self.moves.append(Move(move_id, source, target, key, block_id, pieces, is_beside_steps))
        return move_id
