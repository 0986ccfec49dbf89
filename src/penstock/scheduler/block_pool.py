"""The blocks of the KV cache: who holds them, which are free, and which hold something worth finding again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

# A KV-cache group and the hash of a block's whole prefix in it.
BlockKey = tuple[int, bytes]

NULL_BLOCK_ID = 0


class KVCacheBlock:
    """One block id, and what is known about it.

    ref_count: requests, and others, that hold the block. key: what a full block holds, once it is cached.
    """

    __slots__ = ("block_id", "key", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock(block_id={self.block_id}, ref_count={self.ref_count}, cached={self.key is not None})"


class BlockPool:
    """All block ids of one KV cache, shared by its groups.

    A block is held (ref_count > 0), pending or free. What is let go while steps are in flight is pending until the
    results of the last of them are taken in, since until then somebody may touch it. A block that nobody holds may
    still be cached: it is found by its key until it is reused. Block 0 is the null block, which stands for positions
    that nobody reads; it is none of these.
    Equal content may be in several blocks, when requests computed it side by side.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        # In the order in which they will be reused.
        self._free = OrderedDict.fromkeys(self.blocks[1:])
        # With the step that must be done before they are free, earlier ones first.
        self._pending: OrderedDict[KVCacheBlock, int] = OrderedDict()
        self._last_launched_step_id = self._last_done_step_id = -1
        self._cached: dict[BlockKey, dict[int, KVCacheBlock]] = {}

    def note_launched(self, step_id: int) -> None:
        """From now on this step may touch all blocks that are held."""
        self._last_launched_step_id = step_id

    def note_done(self, step_id: int) -> None:
        """Steps up to this one touch no block any more."""
        self._last_done_step_id = step_id
        while self._pending:
            block, last_step_id = next(iter(self._pending.items()))
            if last_step_id > step_id:
                return
            del self._pending[block]
            self._make_free(block)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out, cached ones included."""
        return len(self._free)

    @property
    def num_pending_blocks(self) -> int:
        """Blocks that will be free once the steps in flight are done, unless somebody finds what they hold before."""
        return len(self._pending)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds; the null block is not counted."""
        return self.num_blocks - 1 - len(self._free) - len(self._pending)

    def free_block_ids(self) -> list[int]:
        """Ids of the free blocks, next to be reused first; linear in their number."""
        return [block.block_id for block in self._free]

    def is_free(self, block: KVCacheBlock) -> bool:
        """Whether the block can be given out."""
        return block in self._free

    def find(self, key: BlockKey) -> KVCacheBlock | None:
        """A block, held or not, with this content."""
        blocks = self._cached.get(key)
        return next(iter(blocks.values())) if blocks else None

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take free blocks, the least recently used first, and forget what they held.

        The caller makes sure that as many are free.
        """
        assert num_blocks <= len(self._free)
        blocks = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            self._forget(block)
            block.ref_count = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold cached blocks once more; null blocks are passed over."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_count == 0:
                del (self._free if block in self._free else self._pending)[block]
            block.ref_count += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Let go of blocks, in the order in which they should be reused; null blocks are passed over.

        Pass a request's last block first: a prefix is of use without its tail, a tail never without its prefix.
        Blocks with nothing to find again are reused before any cached one.
        """
        last_step_id = self._last_launched_step_id
        is_in_flight = last_step_id > self._last_done_step_id
        for block in blocks:
            if block is self.null_block:
                continue
            assert block.ref_count > 0
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if is_in_flight:
                self._pending[block] = last_step_id
            else:
                self._make_free(block)

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], keys: Sequence[BlockKey]) -> list[KVCacheBlock]:
        """Make held, full blocks findable by their keys; null blocks and blocks already cached are passed over.

        Returns those that became findable.
        """
        newly_cached = []
        for block, key in zip(blocks, keys, strict=True):
            if block is self.null_block or block.key is not None:
                continue
            assert block.ref_count > 0
            block.key = key
            self._cached.setdefault(key, {})[block.block_id] = block
            newly_cached.append(block)
        return newly_cached

    def forget_content(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Make blocks, held or free, that turned out not to hold what their keys say unfindable."""
        for block in blocks:
            self._forget(block)

    def forget(self, key: BlockKey) -> None:
        """Let no request find this content again; who holds blocks with it keeps them."""
        for block in self._cached.pop(key, {}).values():
            block.key = None

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. Does nothing and returns False while any block is held."""
        if self.num_used_blocks > 0:
            return False
        self._forget_all()
        return True

    def start_over(self) -> None:
        """No step is in flight any more, and no block has content, held or not: the memory is another one."""
        self._last_done_step_id = self._last_launched_step_id
        self._pending.clear()
        self._forget_all()

    def check_integrity(self, num_holders: Mapping[KVCacheBlock, int]) -> None:
        """Raises AssertionError unless each block is free, pending or held, once, by as many as `num_holders` says."""
        null_block = self.null_block
        assert null_block not in num_holders
        assert (null_block.ref_count, null_block.key) == (0, None)
        states = [*self._free, *self._pending, *num_holders]
        assert sorted(block.block_id for block in states) == list(range(1, self.num_blocks))
        assert all(block.ref_count == num_holders.get(block, 0) for block in self.blocks)
        assert not self._pending or self._last_done_step_id < self._last_launched_step_id
        findable = {block_id: key for key, blocks in self._cached.items() for block_id in blocks}
        assert findable == {block.block_id: block.key for block in self.blocks if block.key is not None}

    def _make_free(self, block: KVCacheBlock) -> None:
        self._free[block] = None
        if block.key is None:
            self._free.move_to_end(block, last=False)

    def _forget_all(self) -> None:
        self._cached.clear()
        for block in self.blocks:
            block.key = None
        # All are worth the same now, and the system has handed out the memory of the lowest.
        self._free = OrderedDict.fromkeys(
            block for block in self.blocks[1:] if block.ref_count == 0 and block not in self._pending
        )

    def _forget(self, block: KVCacheBlock) -> None:
        if block.key is None:
            return
        blocks = self._cached[block.key]
        del blocks[block.block_id]
        if not blocks:
            del self._cached[block.key]
        block.key = None
