"""Events of the prefix cache, made from what its watcher is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec

from penstock.contract import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from penstock.features.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from penstock.features.lora.request import adapter_of
from penstock.scheduler.block_hash import extra_keys
from penstock.scheduler.block_pool import BlockKey, KVCacheBlock
from penstock.scheduler.cache_watcher import CacheWatcher
from penstock.scheduler.kv_cache_groups import KVCacheGroup
from penstock.scheduler.request import Request

# The KV cache, on any device.
KV_CACHE = "GPU"
_KINDS: dict[type[Any], str] = {
    FullAttentionSpec: "full_attention",
    MLAAttentionSpec: "mla_attention",
    SlidingWindowSpec: "sliding_window",
    ChunkedLocalSpec: "chunked_local_attention",
    RecurrentStateSpec: "mamba",
}


def number_of(key: BlockKey) -> int:
    """The hash of a block in events: 64 bits, alike in all processes."""
    return int.from_bytes(key[1][-8:], "big")


class EventLog(CacheWatcher):
    """Events since they were last taken, so that a subscriber has the same set of blocks in each medium.

    Several blocks with one key are one block of the subscriber's.

    keeps_elsewhere: whether blocks are kept in other media, too. Their events repeat what was told of the block in the
    KV cache.
    """

    def __init__(self, groups: Sequence[KVCacheGroup], *, keeps_elsewhere: bool) -> None:
        self._groups, self._keeps_elsewhere = groups, keeps_elsewhere
        self._events: list[KVCacheEvent] = []
        self._stored: dict[str, set[BlockKey]] = {KV_CACHE: set()}
        # Events of the blocks in any medium, with their positions there.
        self._told: dict[BlockKey, tuple[BlockStored, int]] = {}

    def take_events(self) -> list[KVCacheEvent]:
        """Return, and forget, the events."""
        events, self._events = self._events, []
        return events

    def cached(self, request: Request, blocks: Sequence[KVCacheBlock], start: int) -> None:
        stored, hashes = self._stored[KV_CACHE], request.block_hashes
        for group_id, of_group in groupby((block.key for block in blocks if block.key is not None), lambda key: key[0]):
            group = self._groups[group_id]
            index = first = start // group.block_size
            run: list[BlockKey] = []
            for key in of_group:
                while group.key(hashes, index) != key:
                    index += 1
                if key not in stored:
                    if index != first + len(run):
                        self._store(request, run, first)
                        run, first = [], index
                    run.append(key)
                    stored.add(key)
            self._store(request, run, first)

    def loaded(self, request: Request, block: KVCacheBlock, index: int) -> None:
        key = block.key
        if key is not None and self._groups[key[0]].keys(request.block_hashes, index, index + 1) == [key]:
            self.cached(request, (block,), index * self._groups[key[0]].block_size)

    def dropped(self, key: BlockKey) -> None:
        self._remove((key,), KV_CACHE)

    def reset(self) -> None:
        if any(keys for medium, keys in self._stored.items() if medium != KV_CACHE):
            self._remove(list(self._stored[KV_CACHE]), KV_CACHE)
            return
        self._stored[KV_CACHE].clear()
        self._told.clear()
        self._events.append(AllBlocksCleared())

    def kept_elsewhere(self, key: BlockKey, medium: str) -> None:
        stored, told = self._stored.setdefault(medium, set()), self._told.get(key)
        if key in stored or told is None:
            return
        stored.add(key)
        event, index = told
        size, extras = event.block_size, event.extra_keys
        one = msgspec.structs.replace(
            event,
            block_hashes=[event.block_hashes[index]],
            parent_block_hash=event.block_hashes[index - 1] if index else event.parent_block_hash,
            token_ids=event.token_ids[index * size : (index + 1) * size],
            medium=medium,
            extra_keys=None if extras is None else [extras[index]],
        )
        self._events.append(one)

    def lost_elsewhere(self, keys: Iterable[BlockKey] | None, medium: str) -> None:
        self._remove(list(self._stored.get(medium, ())) if keys is None else keys, medium)

    def connector_told(self, events: Sequence[Any]) -> None:
        self._events += (event for event in events if isinstance(event, KVCacheEvent))

    def _store(self, request: Request, run: Sequence[BlockKey], first: int) -> None:
        """Tell of consecutive blocks of a request, from block `first` on, which may be none."""
        if not run:
            return
        group, hashes, end = self._groups[run[0][0]], request.block_hashes, first + len(run)
        size, adapter = group.block_size, adapter_of(request.parts)
        name = None if adapter is None else adapter.lora_name
        event = BlockStored(
            block_hashes=[number_of(key) for key in run],
            parent_block_hash=number_of(group.key(hashes, first - 1)) if first else None,
            token_ids=request.all_token_ids[first * size : end * size],
            block_size=size,
            lora_id=None if adapter is None else adapter.lora_int_id,
            medium=KV_CACHE,
            lora_name=name,
            extra_keys=[_extra(request, name, index * size, size) for index in range(first, end)],
            group_idx=group.group_id,
            kv_cache_spec_kind=_KINDS.get(type(group.spec)),
            kv_cache_spec_sliding_window=getattr(group.spec, "sliding_window", None),
        )
        self._events.append(event)
        if self._keeps_elsewhere:
            self._told.update((key, (event, index)) for index, key in enumerate(run))

    def _remove(self, keys: Iterable[BlockKey], medium: str) -> None:
        stored = self._stored.get(medium, set())
        for key in keys:
            if key not in stored:
                continue
            stored.remove(key)
            if self._told and not any(key in others for others in self._stored.values()):
                self._told.pop(key, None)
            last = self._events[-1] if self._events else None
            if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (medium, key[0]):
                last.block_hashes.append(number_of(key))
            else:
                self._events.append(BlockRemoved([number_of(key)], medium, key[0]))


def _extra(request: Request, adapter: str | None, start: int, size: int) -> tuple[str, ...] | None:
    """Parts of a block's hash beside tokens: the adapter's name, keys of items, and the salt of the first block."""
    names = () if adapter is None else (adapter,)
    # The hash has the adapter's digest or number instead.
    others = (key for kind, key in extra_keys(request, start, start + size) if kind != "part:lora")
    return (*names, *others) or None
