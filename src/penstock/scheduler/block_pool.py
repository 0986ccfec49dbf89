"""Pool of KV cache blocks: reference counts, free list and prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

# KV cache group, and hash of a block's whole prefix.
BlockKey = tuple[int, bytes]

NULL_BLOCK_ID = 0


class KVCacheBlock:
    """State of one block id.

    ref_count: holders of the block, requests and transfers. key: prefix-cache key of a full, cached block.
    """

    __slots__ = ("block_id", "key", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock(block_id={self.block_id}, ref_count={self.ref_count}, cached={self.key is not None})"


class StepIds:
    """Ids of the last step that was launched, which may access all held blocks, and of the last one that is done."""

    __slots__ = ("last_done", "last_launched")

    def __init__(self) -> None:
        self.last_launched = self.last_done = -1


class BlockPool:
    """Block ids of one KV cache, shared by its groups.

    A block is held (ref_count > 0), pending or free. A block released while steps are in flight is pending until the
    results of the last of them are taken in, since these steps may still access it. A free block may be cached: it is
    found by its key until it is reused. Block 0 is the null block, which stands for positions that are never read; it
    is in none of these states.
    Several blocks may have equal content, computed by requests side by side.

    steps: of the scheduler. pending: blocks by the step that must be done before they are free, ascending.
    num_cached_blocks: cached blocks that are not held.
    elsewhere: finds blocks of no pool, for content that is kept outside of it; set while that counts too.
    on_dropped: called with a key that no cached block has any more, but not when all are forgotten at once.
    """

    elsewhere: Callable[[BlockKey], KVCacheBlock | None] | None = None
    on_dropped: Callable[[BlockKey], None] | None = None

    def __init__(self, num_blocks: int, steps: StepIds) -> None:
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        # In order of reuse.
        self._free = OrderedDict.fromkeys(self.blocks[1:])
        self.pending: OrderedDict[KVCacheBlock, int] = OrderedDict()
        self._steps = steps
        self._cached: dict[BlockKey, dict[int, KVCacheBlock]] = {}
        self.num_cached_blocks = 0

    def free_pending(self) -> None:
        """Make the pending blocks free of which all steps are done."""
        while self.pending:
            block, last_step_id = next(iter(self.pending.items()))
            if last_step_id > self._steps.last_done:
                return
            del self.pending[block]
            self._make_free(block)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self._free)

    @property
    def num_pending_blocks(self) -> int:
        """Blocks that become free with the steps in flight, unless a prefix-cache hit takes them before."""
        return len(self.pending)

    @property
    def num_used_blocks(self) -> int:
        """Held blocks, without the null block."""
        return self.num_blocks - 1 - self.num_free_blocks - len(self.pending)

    def free_block_ids(self) -> list[int]:
        """Ids of the free blocks, in order of reuse; linear in their number."""
        return [block.block_id for block in self._free_in_order()]

    def count_free(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Number of free ones among these blocks."""
        return sum(map(self._free.__contains__, blocks))

    def find(self, key: BlockKey) -> KVCacheBlock | None:
        """Return a cached block with this key, held or not."""
        blocks = self._cached.get(key)
        if blocks:
            return next(iter(blocks.values()))
        return None if self.elsewhere is None else self.elsewhere(key)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Allocate free blocks, least recently used first, and evict their content.

        The caller ensures that as many are free.
        """
        assert num_blocks <= len(self._free)
        blocks = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            self._forget(block)
            block.ref_count = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a holder to cached blocks; skips null blocks."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_count == 0:
                del (self._free if block in self._free else self.pending)[block]
                self.num_cached_blocks -= block.key is not None
            block.ref_count += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Remove a holder from blocks, given in order of reuse; skips null blocks.

        Pass a request's last block first: a prefix is useful without its tail, a tail never without its prefix.
        Uncached blocks are reused before any cached one.
        """
        last_step_id = self._steps.last_launched
        is_in_flight = last_step_id > self._steps.last_done
        for block in blocks:
            if block is self.null_block:
                continue
            assert block.ref_count > 0
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            self.num_cached_blocks += block.key is not None
            if is_in_flight:
                self.pending[block] = last_step_id
            else:
                self._make_free(block)

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], keys: Sequence[BlockKey]) -> list[KVCacheBlock]:
        """Add held, full blocks to the prefix cache; skips null blocks and cached blocks.

        Returns the newly cached blocks.
        """
        newly_cached = []
        for block, key in zip(blocks, keys):  # noqa: B905, as in `StepsInFlight.settle`
            if block is self.null_block or block.key is not None:
                continue
            assert block.ref_count > 0
            block.key = key
            self._cached.setdefault(key, {})[block.block_id] = block
            newly_cached.append(block)
        return newly_cached

    def forget_content(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Evict blocks, held or free, whose content is not what their keys say."""
        for block in blocks:
            self._forget(block)

    def forget(self, key: BlockKey) -> None:
        """Evict a key from the prefix cache; holders of its blocks keep them."""
        blocks = self._cached.pop(key, {})
        for block in blocks.values():
            block.key = None
            self.num_cached_blocks -= block.ref_count == 0
        if blocks and self.on_dropped is not None:
            self.on_dropped(key)

    def reset_prefix_cache(self) -> bool:
        """Evict all cached content. Does nothing and returns False while any block is held."""
        if self.num_used_blocks > 0:
            return False
        self._forget_all()
        return True

    def start_over(self) -> None:
        """Reset for new KV cache memory: no step is in flight, and no block has content."""
        self._steps.last_done = self._steps.last_launched
        self.pending.clear()
        self._forget_all()

    def check_integrity(self, num_holders: Mapping[KVCacheBlock, int]) -> None:
        """Raise AssertionError unless each block is in one state, and held blocks have `num_holders` holders."""
        null_block = self.null_block
        assert null_block not in num_holders
        assert (null_block.ref_count, null_block.key) == (0, None)
        free = self._free_in_order()
        states = [*free, *self.pending, *num_holders]
        assert sorted(block.block_id for block in states) == list(range(1, self.num_blocks))
        assert all(block.ref_count == num_holders.get(block, 0) for block in self.blocks)
        assert not self.pending or self._steps.last_done < self._steps.last_launched
        assert self.num_cached_blocks == sum(block.key is not None for block in [*free, *self.pending])
        findable = {block_id: key for key, blocks in self._cached.items() for block_id in blocks}
        assert findable == {block.block_id: block.key for block in self.blocks if block.key is not None}

    def _free_in_order(self) -> list[KVCacheBlock]:
        """Free blocks in order of reuse."""
        return list(self._free)

    def _make_free(self, block: KVCacheBlock) -> None:
        self._free[block] = None
        if block.key is None:
            self._free.move_to_end(block, last=False)

    def _forget_all(self) -> None:
        self._cached.clear()
        self.num_cached_blocks = 0
        for block in self.blocks:
            block.key = None
        # Without content all are equal; the lowest ids have memory that is mapped already.
        self._free = OrderedDict.fromkeys(
            block for block in self.blocks[1:] if block.ref_count == 0 and block not in self.pending
        )

    def _forget(self, block: KVCacheBlock) -> None:
        key = block.key
        if key is None:
            return
        blocks = self._cached[key]
        del blocks[block.block_id]
        block.key = None
        self.num_cached_blocks -= block.ref_count == 0
        if not blocks:
            del self._cached[key]
            if self.on_dropped is not None:
                self.on_dropped(key)
