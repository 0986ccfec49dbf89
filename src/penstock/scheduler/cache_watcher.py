"""Events of the prefix cache, for features that keep or publish its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.scheduler.block_pool import BlockKey, KVCacheBlock
from penstock.scheduler.request import Request

# Media outside of the KV cache, with vLLM's names.
HOST_MEMORY, FOLDER = "CPU", "STORAGE"


class CacheWatcher:
    """Listener of the prefix cache (`KVCacheManager.watch`). All methods are optional, and called in the core's thread.

    Several blocks may have one key.
    """

    def cached(self, request: Request, blocks: Sequence[KVCacheBlock], start: int) -> None:
        """Note newly cached blocks of a request, whose step may not be done.

        The blocks of each group are in the order of their positions, all of them from position `start` on.
        """

    def loaded(self, request: Request, block: KVCacheBlock, index: int) -> None:
        """Note a cached block whose content came from elsewhere for a request. index: its position among blocks."""

    def forgotten(self, keys: Sequence[BlockKey]) -> None:
        """Note that the content of these keys may be wrong, though it was computed, wherever it is kept."""

    def dropped(self, key: BlockKey) -> None:
        """Note that the last block with this key is no longer cached."""

    def reset(self) -> None:
        """Note that nothing is cached any more, instead of `dropped` for each key."""

    def kept_elsewhere(self, key: BlockKey, medium: str) -> None:
        """Note that a copy of a block is kept outside of the KV cache. medium: where."""

    def lost_elsewhere(self, keys: Iterable[BlockKey] | None, medium: str) -> None:
        """Note that copies of these keys, where there were any, are no longer kept there; None for all that were."""

    def connector_told(self, events: Sequence[Any]) -> None:
        """Note events of a KV connector's store, of any types."""


class CacheWatchers(CacheWatcher):
    """All watchers of a prefix cache, in the order in which they came."""

    def __init__(self) -> None:
        self._all: list[CacheWatcher] = []

    def add(self, watcher: CacheWatcher) -> None:
        self._all.append(watcher)

    def cached(self, request: Request, blocks: Sequence[KVCacheBlock], start: int) -> None:
        for one in self._all:
            one.cached(request, blocks, start)

    def loaded(self, request: Request, block: KVCacheBlock, index: int) -> None:
        for one in self._all:
            one.loaded(request, block, index)

    def forgotten(self, keys: Sequence[BlockKey]) -> None:
        for one in self._all:
            one.forgotten(keys)

    def dropped(self, key: BlockKey) -> None:
        for one in self._all:
            one.dropped(key)

    def reset(self) -> None:
        for one in self._all:
            one.reset()

    def kept_elsewhere(self, key: BlockKey, medium: str) -> None:
        for one in self._all:
            one.kept_elsewhere(key, medium)

    def lost_elsewhere(self, keys: Iterable[BlockKey] | None, medium: str) -> None:
        for one in self._all:
            one.lost_elsewhere(keys, medium)

    def connector_told(self, events: Sequence[Any]) -> None:
        for one in self._all:
            one.connector_told(events)
