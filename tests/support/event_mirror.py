"""A subscriber's copy of what blocks an engine has, by its KV cache events alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from penstock.features.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from penstock.scheduler.block_pool import BlockKey

# KV-cache group, and hash in events.
Block = tuple[int, int]


def block_of(key: BlockKey) -> Block:
    """A block of the prefix cache as events name it, by the end of its hash."""
    return key[0], int.from_bytes(key[1][-8:], "big")


class EventMirror:
    """Blocks by medium. texts: tokens up to the end of each block that was ever there, if its beginning was told too.

    extras: what hashes cover beside tokens, by block.
    """

    def __init__(self) -> None:
        self.blocks: dict[str, set[Block]] = defaultdict(set)
        self.texts: dict[Block, list[int]] = {}
        self.extras: dict[Block, tuple[str, ...] | None] = {}
        self.num_clears = 0

    def take(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                self.num_clears += 1
            elif isinstance(event, BlockRemoved):
                for block in self._of(event):
                    self.blocks[event.medium or ""].remove(block)
            elif isinstance(event, BlockStored):
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        text = [] if parent is None else self.texts.get((event.group_idx or 0, int(parent)))
        for index, block in enumerate(self._of(event)):
            assert block not in self.blocks[event.medium or ""], "it is there already"
            self.blocks[event.medium or ""].add(block)
            self.extras[block] = None if event.extra_keys is None else event.extra_keys[index]
            if text is not None:
                text = [*text, *event.token_ids[index * size : (index + 1) * size]]
                assert self.texts.setdefault(block, text) == text

    @staticmethod
    def _of(event: BlockStored | BlockRemoved) -> list[Block]:
        assert event.group_idx is not None
        return [(event.group_idx, int(one)) for one in event.block_hashes]
