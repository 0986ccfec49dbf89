"""KV cache groups: block counts, prefix-cache hits and skipped blocks by kind of layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from penstock.contract import KVCacheSpec, RecurrentStateSpec
from penstock.contract.feature import make_side
from penstock.errors import UnsupportedFeature
from penstock.scheduler.block_pool import BlockKey, BlockPool, KVCacheBlock
from penstock.scheduler.request import Request
from penstock.scheduler.state_pool import StatePool

# Borders of blocks of which a group of states knows that a request has passed them: about a million tokens.
_MOST_SEEN = 1 << 16


@dataclass(slots=True)
class Trail:
    """Snapshots that a request leaves behind.

    lasting: blocks whose snapshots no deeper ones supersede. num_kept: others that are kept, the deepest ones.
    passed: kept ones that the request has let go of, with their keys.
    """

    lasting: frozenset[int]
    num_kept: int
    passed: list[tuple[KVCacheBlock, BlockKey | None]] = field(default_factory=list)


class KVCacheGroup:
    """Layers that share a block table. The manager keeps the block tables of requests.

    By default a block holds the KV of token positions, all of which are read until the end of the request.

    spec: of its layers. block_size: positions per block.
    pool: pool of its blocks. hash_block_size: tokens per block hash, a divisor of the block size.
    num_own_blocks: maximum of leading blocks of a request's row that are for the request as a whole, and never shared.
    caches_prefixes: whether a block's KV depends on the tokens before its end alone, so that requests can share it.
    takes_blocks: whether each block of positions is needed; else blocks are null, unless `snapshots` names them.
    shares_in_step: whether a request can read a block in the step that fills it for another request. A layer that
        computes requests one after another, such as a recurrent one, cannot.
    """

    caches_prefixes: bool = True
    takes_blocks: ClassVar[bool] = True
    shares_in_step: ClassVar[bool] = True

    def __init__(self, group_id: int, spec: Any, pool: BlockPool, hash_block_size: int) -> None:
        self.group_id = group_id
        self.pool = pool
        self.block_size: int = spec.block_size
        self.num_own_blocks: int = spec.num_own_blocks
        self.spec = spec
        self._hashes_per_block = self.block_size // hash_block_size

    def num_blocks(self, request: Request, num_tokens: int, lookahead: int) -> int:
        """Return the blocks of the request's first `num_tokens`, skipped ones included, its own ones not.

        lookahead: tokens beyond these that a speculator may write, up to the request's length limit.
        """
        num_positions = min(num_tokens + lookahead, max(num_tokens, request.length_limit)) if lookahead else num_tokens
        return -(-num_positions // self.block_size)

    def num_own_blocks_of(self, request: Request) -> int:
        """Return the blocks that are for the request as a whole."""
        return self.num_own_blocks

    def num_blocks_at_once(self, request: Request, num_tokens: int, max_new_tokens: int) -> int:
        """Return the maximum of blocks needed at once up to `num_tokens`, in steps of `max_new_tokens`."""
        return self.spec.max_blocks_per_request(num_tokens, max_new_tokens)  # type: ignore[no-any-return]

    def capacity(self, request: Request, num_blocks: int, lookahead: int) -> int:
        """Return the tokens of a request for which so many blocks of positions are enough, with a `lookahead`."""
        capacity: int = self.spec.capacity(self.num_own_blocks + num_blocks)
        return capacity - lookahead if capacity < request.length_limit else capacity

    def num_taken_first(self, request: Request, num_tokens: int, max_new_tokens: int, found: list[KVCacheBlock]) -> int:
        """Return the free blocks that a request needs from here on, with these blocks of a hit, up to `num_tokens`."""
        num_needed = self.num_blocks_at_once(request, num_tokens, max_new_tokens)
        if found:
            # Null blocks, and those of the hit that others hold, are not taken.
            num_needed -= len(found) - self.pool.count_free(found) - found.count(self.pool.null_block)
        return num_needed

    def key(self, block_hashes: Sequence[bytes], index: int) -> BlockKey:
        """Return the prefix-cache key of block `index`: the last hash inside it covers all tokens up to its end."""
        return self.group_id, block_hashes[(index + 1) * self._hashes_per_block - 1]

    def keys(self, block_hashes: Sequence[bytes], first: int, end: int) -> list[BlockKey]:
        """Return the prefix-cache keys of the blocks from `first` to `end`."""
        per_block, group_id = self._hashes_per_block, self.group_id
        return [(group_id, one) for one in block_hashes[(first + 1) * per_block - 1 : end * per_block : per_block]]

    def find(self, block_hashes: Sequence[bytes], index: int) -> KVCacheBlock | None:
        """Return a cached block for block `index`, if there is one."""
        return self.pool.find(self.key(block_hashes, index))

    def find_hit(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[KVCacheBlock]:
        """Return the blocks of the longest prefix-cache hit of at most `max_num_tokens`.

        Null blocks stand for those that will not be read.
        """
        return []

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Return the leading blocks that no later token reads, once so many positions are computed."""
        return 0

    def cache(
        self, blocks: list[KVCacheBlock], block_hashes: Sequence[bytes], first: int, end: int
    ) -> list[KVCacheBlock]:
        """Add the full blocks from `first` to `end` of a request to the prefix cache; return the newly cached ones."""
        return self.pool.cache_full_blocks(blocks[first:end], self.keys(block_hashes, first, end))

    def cache_loaded(self, block: KVCacheBlock, key: BlockKey, index: int) -> None:
        """Add a held block, whose content was loaded, to the prefix cache. index: its position among blocks."""
        self.pool.cache_full_blocks([block], [key])


class FullAttentionGroup(KVCacheGroup):
    """Full attention: every position is read by all later ones."""

    def find_hit(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = []
        find, key = self.pool.find, self.key
        for index in range(max_num_tokens // self.block_size):
            block = find(key(block_hashes, index))
            if block is None:
                break
            blocks.append(block)
        return blocks


class LocalAttentionGroup(KVCacheGroup):
    """Sliding windows and chunks: a token reads the positions from `first_read` of the spec on."""

    def find_hit(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[KVCacheBlock]:
        """Search backwards for consecutive blocks that cover what the next token reads, or reach the beginning."""
        end = max_num_tokens // self.block_size
        run: list[KVCacheBlock] = []
        for index in range(end - 1, -1, -1):
            if index < self.num_skipped_blocks(end * self.block_size):
                break
            block = self.find(block_hashes, index)
            if block is None:
                end = index
                run.clear()
            else:
                run.append(block)
        run.reverse()
        return [self.pool.null_block] * (end - len(run)) + run

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return self.spec.first_read(num_computed_tokens) // self.block_size  # type: ignore[no-any-return]


class StateGroup(KVCacheGroup):
    """Recurrent state: blocks of a request's own, and snapshots at borders of blocks.

    A prefix-cache hit goes on from one snapshot, wherever earlier ones are. A request takes a snapshot at the last
    border of each step's tokens, so that its last one is the end of a turn, at the last border of its prompt, and where
    its prompt parts from earlier ones; with `snapshots="all"` of the spec at all borders. It takes free blocks only,
    and lets go of them once they are cached and passed.
    """

    takes_blocks = False
    shares_in_step = False
    pool: StatePool

    def __init__(self, group_id: int, spec: RecurrentStateSpec, pool: StatePool, hash_block_size: int) -> None:
        super().__init__(group_id, spec, pool, hash_block_size)
        self.caches_prefixes = spec.snapshots != "none"
        self._takes_all = spec.snapshots == "all"
        # Hashes of prefixes at borders, least recently seen first.
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def num_blocks(self, request: Request, num_tokens: int, lookahead: int) -> int:
        return num_tokens // self.block_size

    def num_taken_first(self, request: Request, num_tokens: int, max_new_tokens: int, found: list[KVCacheBlock]) -> int:
        return self.num_own_blocks + self.pool.count_free(found[-1:])

    def capacity(self, request: Request, num_blocks: int, lookahead: int) -> int:
        return super().capacity(request, num_blocks, lookahead=0)

    def find_hit(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[KVCacheBlock]:
        """Search backwards for a snapshot, at depths that some snapshot has."""
        most = max_num_tokens // self.block_size
        depths = self.pool.depths.get(self.group_id, ())
        is_known = len(depths) < most and self.pool.elsewhere is None
        tried = sorted((depth for depth in depths if depth <= most), reverse=True) if is_known else None
        for depth in range(most, 0, -1) if tried is None else tried:
            block = self.find(block_hashes, depth - 1)
            if block is not None:
                return [self.pool.null_block] * (depth - 1) + [block]
        return []

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        # The next token still reads a snapshot at the border before it.
        return max(0, num_computed_tokens - 1) // self.block_size

    def begin_trail(self, request: Request, num_found: int, *, is_one_earlier: bool) -> Trail:
        """Choose where the request leaves snapshots that last, besides those of its hit.

        Those are the last block of the prompt before its last token, since a later request of the same prompt computes
        at least that one, and the last block of the longest prefix that was seen before, where it goes beyond the hit.

        num_found: blocks of the hit. is_one_earlier: a prefix-cache hit leaves out the last full block of a prompt.
        """
        per_block = self._hashes_per_block
        hashes = request.block_hashes[per_block - 1 :: per_block]
        deepest = min(len(hashes), (request.num_tokens - 1) // self.block_size)
        seen = next((depth for depth in range(deepest, num_found, -1) if hashes[depth - 1] in self._seen), num_found)
        end_of_prompt = (request.num_prompt_tokens - 1) // self.block_size
        lasting = (depth - is_one_earlier - 1 for depth in (end_of_prompt, seen))
        return Trail(frozenset((num_found - 1, *lasting)), 1 + is_one_earlier)

    def take_snapshots(self, blocks: list[KVCacheBlock], first: int, trail: Trail) -> None:
        """Replace null blocks, of those from `first` on, by blocks that the request's step fills for others."""
        last = len(blocks) - 1
        indices = [
            index for index in range(first, last + 1) if self._takes_all or index == last or index in trail.lasting
        ]
        # The deepest ones, if not all are free.
        indices = indices[max(0, len(indices) - self.pool.num_free_blocks) :]
        for index, block in zip(indices, self.pool.get_new_blocks(len(indices)), strict=True):
            blocks[index] = block

    def note_passed(self, blocks: Sequence[KVCacheBlock], first: int, trail: Trail) -> None:
        """Let the latest snapshots supersede earlier ones. blocks: of the request, let go of, from block `first` on."""
        if self._takes_all:
            return
        for index, block in enumerate(blocks, first):
            if block is not self.pool.null_block and index not in trail.lasting:
                trail.passed.append((block, block.key))
        while len(trail.passed) > trail.num_kept:
            self.pool.supersede(*trail.passed.pop(0))

    def cache(
        self, blocks: list[KVCacheBlock], block_hashes: Sequence[bytes], first: int, end: int
    ) -> list[KVCacheBlock]:
        newly_cached = []
        for index, key in zip(range(first, end), self.keys(block_hashes, first, end), strict=True):
            self._seen[key[1]] = None
            self._seen.move_to_end(key[1])
            if blocks[index] is not self.pool.null_block:
                newly_cached += self.pool.cache_snapshot(blocks[index], key, index + 1)
        while len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return newly_cached

    def cache_loaded(self, block: KVCacheBlock, key: BlockKey, index: int) -> None:
        self.pool.cache_snapshot(block, key, index + 1)


class CrossAttentionGroup(KVCacheGroup):
    """Cross attention: blocks of a request's source, from its first step to its end; none of token positions."""

    caches_prefixes = False
    takes_blocks = False

    def num_own_blocks_of(self, request: Request) -> int:
        return self.spec.blocks_of_source(request.source_length)  # type: ignore[no-any-return]

    def num_blocks_at_once(self, request: Request, num_tokens: int, max_new_tokens: int) -> int:
        return self.num_own_blocks_of(request)

    def num_blocks(self, request: Request, num_tokens: int, lookahead: int) -> int:
        return 0

    def capacity(self, request: Request, num_blocks: int, lookahead: int) -> int:
        return self.spec.capacity(num_blocks)  # type: ignore[no-any-return]


def make_group(group_id: int, spec: KVCacheSpec, pool: BlockPool, hash_block_size: int) -> KVCacheGroup:
    """Create the group that a spec names. Raises UnsupportedFeature for a spec that names none."""
    group = getattr(spec, "kv_cache_group", None)
    if group is None:
        raise UnsupportedFeature(
            f"{type(spec).__name__} names no KV cache group. Set its kv_cache_group to the 'module:name' of one."
        )
    made: KVCacheGroup = make_side(group, group_id, spec, pool, hash_block_size)
    return made
