"""Moves of blocks between the KV cache and a folder: messages between scheduler and workers."""

from __future__ import annotations

from typing import NamedTuple

from penstock.scheduler.block_pool import BlockKey


class Move(NamedTuple):
    """Move of one block. move_id: unique in its core. block_id: in the KV cache.

    is_beside_steps: of a save, which then takes as little from the steps as it can.
    """

    move_id: int
    is_load: bool
    key: BlockKey
    block_id: int
    is_beside_steps: bool = False


class MoveResult(NamedTuple):
    """Result of a move on one rank. num_bytes: moved. error: why it failed; None where it is done.

    cost_s: seconds of CPU time of a save, on cores that the steps use; 0 where they use others.
    """

    move_id: int
    num_bytes: int
    error: str | None = None
    cost_s: float = 0.0
