"""Pool of recurrent states: those that requests need, and snapshots, of which the least useful are evicted first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from penstock.scheduler.block_pool import BlockKey, BlockPool, KVCacheBlock, StepIds


class StatePool(BlockPool):
    """Block pool whose cached blocks are snapshots.

    Free blocks are reused in this order: those without content; superseded snapshots, oldest first; all others, least
    recently used first. A snapshot is superseded when its request has left a deeper one, where it is neither the end of
    a prompt nor of a prefix that requests share: chunks and decoding pass many borders, of which the last one counts.

    depths: snapshots by KV cache group and by blocks of their prefix, so that a search tries no other depths.
    num_taken: snapshots so far. num_evicted: those that made room for others before they were superseded.
    """

    def __init__(self, num_blocks: int, steps: StepIds) -> None:
        super().__init__(num_blocks, steps)
        self.depths: dict[int, Counter[int]] = {}
        self.num_taken = self.num_evicted = 0
        self._depth_of: dict[KVCacheBlock, int] = {}
        self._superseded: OrderedDict[KVCacheBlock, None] = OrderedDict()
        # Superseded while they were held or pending.
        self._marked: set[KVCacheBlock] = set()

    @property
    def num_snapshots(self) -> int:
        """Snapshots that are kept for later requests. Superseded ones can be found too, until they make room."""
        return len(self._depth_of) - len(self._superseded) - len(self._marked)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._superseded)

    def count_free(self, blocks: Sequence[KVCacheBlock]) -> int:
        return super().count_free(blocks) + sum(map(self._superseded.__contains__, blocks))

    def cache_snapshot(self, block: KVCacheBlock, key: BlockKey, depth: int) -> list[KVCacheBlock]:
        """Add a held block to the prefix cache, the state after `depth` blocks of tokens; return it if it is new."""
        newly_cached = super().cache_full_blocks([block], [key])
        if newly_cached:
            self._depth_of[block] = depth
            self.depths.setdefault(key[0], Counter())[depth] += 1
            self.num_taken += 1
        return newly_cached

    def is_superseded(self, block: KVCacheBlock) -> bool:
        """Whether a cached block is reused before other snapshots."""
        return block in self._superseded or block in self._marked

    def supersede(self, block: KVCacheBlock, key: BlockKey | None) -> None:
        """Reuse the block before other snapshots, if it still has this key, once it is free."""
        if key is None or block.key != key or block in self._superseded:
            return
        if block in self._free:
            del self._free[block]
            self._superseded[block] = None
        else:
            self._marked.add(block)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        blocks = []
        for _ in range(num_blocks):
            first = next(iter(self._free), None)
            is_last = first is None or first.key is not None
            queue = self._superseded if self._superseded and is_last else self._free
            block, _ = queue.popitem(last=False)
            self.num_evicted += block.key is not None and queue is self._free
            self._forget(block)
            block.ref_count = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            if block in self._superseded:
                del self._superseded[block]
                self._free[block] = None
            self._marked.discard(block)
            super().touch((block,))

    def forget(self, key: BlockKey) -> None:
        for block in list(self._cached.get(key, {}).values()):
            self._forget(block)

    def check_integrity(self, num_holders: Mapping[KVCacheBlock, int]) -> None:
        super().check_integrity(num_holders)
        cached = {block for block in self.blocks if block.key is not None}
        assert self._depth_of.keys() == cached
        assert self._marked <= cached
        assert self._superseded.keys() <= cached - self._marked
        assert sum(count.total() for count in self.depths.values()) == len(cached)

    def _free_in_order(self) -> list[KVCacheBlock]:
        without = [block for block in self._free if block.key is None]
        return [*without, *self._superseded, *(block for block in self._free if block.key is not None)]

    def _make_free(self, block: KVCacheBlock) -> None:
        if block in self._marked:
            self._marked.remove(block)
            self._superseded[block] = None
        else:
            super()._make_free(block)

    def _forget_all(self) -> None:
        self.depths.clear()
        self._depth_of.clear()
        self._superseded.clear()
        self._marked.clear()
        super()._forget_all()

    def _forget(self, block: KVCacheBlock) -> None:
        if block.key is None:
            return
        depths, depth = self.depths[block.key[0]], self._depth_of.pop(block)
        depths[depth] -= 1
        if not depths[depth]:
            del depths[depth]
        self._marked.discard(block)
        if self._superseded.pop(block, block) is None:
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        super()._forget(block)
