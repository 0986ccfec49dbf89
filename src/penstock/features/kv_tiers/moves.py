"""Moves of blocks between the KV cache and a folder: messages between scheduler and workers."""

from __future__ import annotations

from typing import NamedTuple

from penstock.scheduler.block_pool import BlockKey


class Move(NamedTuple):
    """Move of one block. move_id: unique in its core. block_id: in the KV cache."""

    move_id: int
    is_load: bool
    key: BlockKey
    block_id: int


class MoveResult(NamedTuple):
    """Result of a move on one rank. num_bytes: moved. error: why it failed; None where it is done."""

    move_id: int
    num_bytes: int
    error: str | None = None
