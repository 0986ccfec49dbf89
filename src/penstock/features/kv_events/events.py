"""KV cache events as subscribers get them: MessagePack, the batch as an array and each event as a map with its `type`.

These are vLLM's names and fields since its version 0.23; before, events were arrays, too.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

# Last 8 bytes of a block's hash, as an unsigned integer; connectors may give the bytes.
BlockHash: TypeAlias = int | bytes


class KVCacheEvent(msgspec.Struct, tag=True, omit_defaults=True):
    """Base of events."""


class BlockStored(KVCacheEvent):
    """Consecutive full blocks of a prefix that are there now. All have the same size, adapter and KV-cache group.

    block_hashes: of each block with all tokens before it. parent_block_hash: of the block before; None for none.
    token_ids: of all these blocks. lora_id, lora_name: of the adapter; None without one.
    medium: "GPU" is the KV cache, on any device; "CPU" host memory, "STORAGE" a folder.
    extra_keys: by block, what its hash covers beside tokens; None for nothing.
    kv_cache_spec_kind: kind of the group's layers. kv_cache_spec_sliding_window: in tokens; None without one.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks that are no longer in this medium."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """No block is there any more, in any medium."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events in order. ts: seconds since 1970. data_parallel_rank: of the engine."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVEventBatch(EventBatch):
    """Events in order, of these types alone."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
