"""What differs between kinds of KV cache: which blocks of a prefix are needed, and which are no longer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from penstock.contract import KVCacheSpec, SlidingWindowSpec
from penstock.scheduler.block_pool import BlockKey, BlockPool, KVCacheBlock


class KVCacheGroup(ABC):
    """The layers that share a block table. Knows no request; the manager keeps their block lists.

    hash_block_size: positions per block hash of a request, a divisor of this group's block size.
    """

    def __init__(self, group_id: int, block_size: int, pool: BlockPool, hash_block_size: int) -> None:
        self.group_id = group_id
        self.block_size = block_size
        self._pool = pool
        self._hashes_per_block = block_size // hash_block_size

    def key(self, block_hashes: Sequence[bytes], index: int) -> BlockKey:
        """The key of a request's block at `index`: the last hash inside it covers it and all before it."""
        return self.group_id, block_hashes[(index + 1) * self._hashes_per_block - 1]

    def find(self, block_hashes: Sequence[bytes], index: int) -> KVCacheBlock | None:
        """A cached block that holds what a request's block at `index` must hold."""
        return self._pool.find(self.key(block_hashes, index))

    @abstractmethod
    def find_hit(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[KVCacheBlock]:
        """The blocks of the longest prefix, of at most `max_num_tokens`, after which a request can go on.

        Null blocks stand for those that will not be read.
        """

    @abstractmethod
    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that no later token reads, once so many positions are computed."""


class FullAttentionGroup(KVCacheGroup):
    """Every position is read by all later ones."""

    def find_hit(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = []
        for index in range(max_num_tokens // self.block_size):
            block = self.find(block_hashes, index)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return 0


class SlidingWindowGroup(KVCacheGroup):
    """A token reads itself and the `sliding_window - 1` positions before it."""

    def __init__(
        self, group_id: int, block_size: int, pool: BlockPool, hash_block_size: int, sliding_window: int
    ) -> None:
        super().__init__(group_id, block_size, pool, hash_block_size)
        self._num_earlier_positions = sliding_window - 1
        self._num_earlier_blocks = math.ceil(self._num_earlier_positions / block_size)

    def find_hit(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[KVCacheBlock]:
        """Search backwards for blocks in a row that cover the window, or reach the beginning."""
        end = max_num_tokens // self.block_size
        run: list[KVCacheBlock] = []
        for index in range(end - 1, -1, -1):
            if len(run) == self._num_earlier_blocks:
                break
            block = self.find(block_hashes, index)
            if block is None:
                end = index
                run.clear()
            else:
                run.append(block)
        run.reverse()
        return [self._pool.null_block] * (end - len(run)) + run

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self._num_earlier_positions) // self.block_size


def make_group(group_id: int, spec: KVCacheSpec, pool: BlockPool, hash_block_size: int) -> KVCacheGroup:
    """The group that manages blocks of this kind."""
    if isinstance(spec, SlidingWindowSpec):
        return SlidingWindowGroup(group_id, spec.block_size, pool, hash_block_size, spec.sliding_window)
    return FullAttentionGroup(group_id, spec.block_size, pool, hash_block_size)
