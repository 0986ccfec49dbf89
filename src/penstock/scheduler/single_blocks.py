"""Blocks of the KV cache that are held one by one, whatever requests do, such as while they are copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.scheduler.block_pool import KVCacheBlock
from penstock.scheduler.kv_cache_groups import KVCacheGroup


class SingleBlocks:
    """Holders of single blocks. num_holders: by block."""

    def __init__(self, groups: Sequence[KVCacheGroup]) -> None:
        self._groups = groups
        self.num_holders: Counter[KVCacheBlock] = Counter()

    def take(self, group_ids: Sequence[int], *, share: float = 1.0, num_others: int = 0) -> list[KVCacheBlock] | None:
        """Take free blocks of these groups for content from elsewhere, held; None, with nothing taken, if too few are.

        `release` releases each. share: of the free blocks of a pool that these and `num_others` may be together.
        """
        pools = [self._groups[group_id].pool for group_id in group_ids]
        if any(count + num_others > share * pool.num_free_blocks for pool, count in Counter(pools).items()):
            return None
        blocks = [pool.get_new_blocks(1)[0] for pool in pools]
        self.num_holders.update(blocks)
        return blocks

    def hold(self, block: KVCacheBlock, group_id: int) -> None:
        """Hold a cached block until `release`."""
        self._groups[group_id].pool.touch((block,))
        self.num_holders[block] += 1

    def release(self, block: KVCacheBlock, group_id: int) -> None:
        """Release a block of `take` or `hold`."""
        assert self.num_holders[block] > 0
        self.num_holders[block] -= 1
        if not self.num_holders[block]:
            del self.num_holders[block]
        self._groups[group_id].pool.free_blocks((block,))
