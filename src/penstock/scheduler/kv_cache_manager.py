"""KV cache manager: block tables of requests, and the prefix cache."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import cycle, zip_longest

from penstock.contract import KVCacheConfig, RecurrentStateSpec
from penstock.errors import LifecycleError
from penstock.scheduler.block_hash import BlockHasher
from penstock.scheduler.block_pool import BlockKey, BlockPool, KVCacheBlock, StepIds
from penstock.scheduler.cache_watcher import CacheWatcher, CacheWatchers
from penstock.scheduler.kv_cache_groups import KVCacheGroup, StateGroup, Trail, make_group
from penstock.scheduler.request import Request
from penstock.scheduler.single_blocks import SingleBlocks
from penstock.scheduler.state_pool import StatePool

_NEVER = _UNLIMITED = sys.maxsize


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Prefix-cache hit: its length in tokens, and its blocks per group, not yet held."""

    num_tokens: int
    blocks: tuple[list[KVCacheBlock], ...]


class _HeldBlocks:
    """Block table of one request.

    own: per group, blocks for the request as a whole.
    groups: per group, blocks by position; the null block where positions are not, or no longer, read.
    num_found: per group, leading blocks of the prefix-cache hit.
    num_passed: per group, leading blocks that are not read any more.
    num_cached: per group, leading blocks that are in the prefix cache.
    trails: by group of states, where snapshots are left.
    """

    __slots__ = ("groups", "num_cached", "num_found", "num_passed", "own", "request", "trails")

    def __init__(self, request: Request, groups: list[list[KVCacheBlock]]) -> None:
        self.request = request
        self.groups = groups
        self.trails: dict[int, Trail] = {}
        self.own: list[list[KVCacheBlock]] = [[] for _ in groups]
        self.num_found = tuple(len(blocks) for blocks in groups)
        self.num_cached = list(self.num_found)
        self.num_passed = [0] * len(groups)


class KVCacheManager:
    """Allocates blocks for requests, frees them, and shares equal prefixes among requests.

    A block is cached once it is full of known tokens that are computed, or scheduled: a request may read a block that
    another one writes in the same step. The scheduler evicts blocks that were not computed after all.

    num_lookahead_tokens: tokens beyond those of a step that a speculator may write.
    blocks_need_next_token: whether the KV of a block's last token depends on the token after it too, as with an EAGLE
        head. Then the last block of a prefix-cache hit is computed anew, since another token may follow it.

    caches_prefixes: whether requests share blocks. watchers: features that are told what happens to cached blocks.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        enable_prefix_caching: bool,
        max_num_batched_tokens: int,
        num_lookahead_tokens: int = 0,
        blocks_need_next_token: bool = False,
    ) -> None:
        self.config = kv_cache_config
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_lookahead_tokens = num_lookahead_tokens
        self._blocks_need_next_token = blocks_need_next_token
        self.steps = StepIds()
        of_states = {group.pool for group in kv_cache_config.groups if isinstance(group.spec, RecurrentStateSpec)}
        self.pools: list[BlockPool] = [
            (StatePool if index in of_states else BlockPool)(pool.num_blocks, self.steps)
            for index, pool in enumerate(kv_cache_config.pools)
        ]
        hash_block_size = math.gcd(*(group.spec.block_size for group in kv_cache_config.groups)) or 1
        self._hasher = BlockHasher(hash_block_size)
        self.groups: list[KVCacheGroup] = [
            make_group(index, group.spec, self.pools[group.pool], hash_block_size)
            for index, group in enumerate(kv_cache_config.groups)
        ]
        self._pool_indices = [group.pool for group in kv_cache_config.groups]
        self._groups_of_pools = [
            [index for index, of_group in enumerate(self._pool_indices) if of_group == pool]
            for pool in range(len(self.pools))
        ]
        can_cache = bool(self.groups) and all(group.caches_prefixes for group in self.groups)
        self.caches_prefixes = enable_prefix_caching and can_cache
        self._shares_in_step = all(group.shares_in_step for group in self.groups)
        self._has_fixed_blocks = not all(group.takes_blocks for group in self.groups)
        never_skips = KVCacheGroup.num_skipped_blocks
        self._skipping_groups = [
            (index, group)
            for index, group in enumerate(self.groups)
            if type(group).num_skipped_blocks is not never_skips
        ]
        self._state_groups = {index: group for index, group in enumerate(self.groups) if isinstance(group, StateGroup)}
        self._no_hit = PrefixHit(0, tuple([] for _ in self.groups))
        self._held: dict[str, _HeldBlocks] = {}
        # Blocks held by transfers, by request id and holder; those of each pool.
        self._holds: dict[tuple[str, str], list[list[KVCacheBlock]]] = {}
        self.single_blocks = SingleBlocks(self.groups)
        self.watchers = CacheWatchers()

    def watch(self, watcher: CacheWatcher) -> None:
        """Let a feature know what happens to cached blocks from now on."""
        self.watchers.add(watcher)
        for pool in self.pools:
            pool.on_dropped = self.watchers.dropped

    @property
    def num_used_blocks(self) -> int:
        """Held blocks of all pools, without null blocks."""
        return sum(pool.num_used_blocks for pool in self.pools)

    @property
    def can_reserve(self) -> bool:
        """Whether blocks can be reserved for KV that is computed elsewhere: recurrent states and the KV of an encoder's
        output cannot be loaded."""
        return not self._has_fixed_blocks

    def blocks_needed(self, request: Request, num_tokens: int) -> list[int]:
        """Return the maximum number of blocks of each pool that a request needs at this length."""
        max_new_tokens = self._max_num_batched_tokens + self._num_lookahead_tokens
        return self._by_pool([group.num_blocks_at_once(request, num_tokens, max_new_tokens) for group in self.groups])

    def holds(self, request: Request) -> bool:
        """Whether the request has blocks: it runs, or waits with reserved ones."""
        return request.req_id in self._held

    def holds_any(self, request: Request, blocks: Set[KVCacheBlock]) -> bool:
        """Whether the request has one of these blocks."""
        return any(not blocks.isdisjoint(of_group) for of_group in self._held[request.req_id].groups)

    def block_hashes(self, request: Request) -> Sequence[bytes]:
        """Hashes of a request's known tokens up to the end of each block, of the smallest size of all groups."""
        self._hasher.extend(request)
        return request.block_hashes

    def blocks_before(self, request: Request, num_tokens: int) -> set[KVCacheBlock]:
        """Blocks of a request's first tokens; none if it holds none."""
        held = self._held.get(request.req_id)
        if held is None:
            return set()
        return {
            block
            for group, blocks in zip(self.groups, held.groups, strict=True)
            for block in blocks[: num_tokens // group.block_size]
        }

    def whole_blocks(self, num_tokens: int) -> int:
        """Round down to a number of tokens that fills whole blocks in all groups."""
        return num_tokens - num_tokens % math.lcm(*(group.block_size for group in self.groups))

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...]:
        """Return the block ids of a request, per group: its own, then by position; 0 where positions are not read."""
        held = self._held[req_id]
        of_groups = [own + blocks if own else blocks for own, blocks in zip(held.own, held.groups)]  # noqa: B905
        return tuple([[block.block_id for block in blocks] for blocks in of_groups])

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """Return the longest prefix-cache hit before the last known token: at least one token must run.

        No hit where prompt log-probabilities or pooling need the whole prompt. For a waiting request with reserved
        blocks, the tokens loaded there.
        """
        held = self._held.get(request.req_id)
        if held is not None:
            return PrefixHit(request.num_computed_tokens, tuple(blocks.copy() for blocks in held.groups))
        if not self.caches_prefixes or request.needs_all_of_prompt:
            return self._no_hit
        self._hasher.extend(request)
        length = request.num_tokens - 1
        if self._blocks_need_next_token:
            of_positions = [group for group in self.groups if group.takes_blocks]
            length = self._longest_hit(of_positions, request.block_hashes, length).num_tokens - 1
            if length <= 0:
                return self._no_hit
        return self._longest_hit(self.groups, request.block_hashes, length)

    def keys_of(self, request: Request) -> list[BlockKey]:
        """Return the keys of all whole blocks of a request's known tokens."""
        self._hasher.extend(request)
        return [
            key
            for group in self.groups
            for key in group.keys(request.block_hashes, 0, request.num_tokens // group.block_size)
        ]

    def find_with(self, request: Request, elsewhere: Callable[[BlockKey], KVCacheBlock | None]) -> PrefixHit:
        """Return the prefix-cache hit as it would be with the blocks that `elsewhere` finds, which are of no pool."""
        for pool in self.pools:
            pool.elsewhere = elsewhere
        try:
            return self.get_computed_blocks(request)
        finally:
            for pool in self.pools:
                pool.elsewhere = None

    @staticmethod
    def _longest_hit(groups: Sequence[KVCacheGroup], block_hashes: Sequence[bytes], max_num_tokens: int) -> PrefixHit:
        """Return the longest prefix-cache hit of at most so many tokens in these groups."""
        length = max_num_tokens
        hits: list[list[KVCacheBlock]] = [[] for _ in groups]
        # Each group may shorten the hit, until all agree.
        num_agreeing = 0
        for index, group in cycle(enumerate(groups)):
            hits[index] = group.find_hit(block_hashes, length)
            found = len(hits[index]) * group.block_size
            num_agreeing = num_agreeing + 1 if found == length else 1
            length = found
            if num_agreeing == len(groups):
                break
        return PrefixHit(length, tuple(hits))

    def has_room_for(self, request: Request, hit: PrefixHit) -> bool:
        """Whether the free blocks suffice for all known tokens of a request.

        A request admitted with room for its first prefill chunk only would soon be preempted for its second.
        """
        num_tokens, max_new_tokens = request.num_tokens, self._max_num_batched_tokens + self._num_lookahead_tokens
        counts = self._by_pool(
            [
                group.num_taken_first(request, num_tokens, max_new_tokens, found)
                for group, found in zip(self.groups, hit.blocks)  # noqa: B905
            ]
        )
        if self._are_free(counts):
            return True
        # Running requests hold snapshots longer than they need them.
        return bool(self._state_groups) and self._let_go_of_snapshots() and self._are_free(counts)

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hit: PrefixHit | None = None
    ) -> tuple[list[int], ...] | None:
        """Allocate blocks for the next `num_new_tokens` positions.

        hit: prefix-cache hit of a request without blocks.
        Returns the new block ids per group; () if none are needed; None, with nothing changed, if too few are free.
        """
        if hit is not None and request.req_id not in self._held:
            return self._allocate_first(request, num_new_tokens, hit)
        num_tokens = request.num_computed_tokens + num_new_tokens
        if num_tokens <= request.kv_capacity:
            return ()
        held = self._held[request.req_id]
        if self._skipping_groups:
            self._free_skipped(held, self._skipping_groups)
        if self._state_groups and num_new_tokens == 1 and num_tokens < request.length_limit:
            # Attention needs its next block a token after the border of a snapshot: both at once, if they are free.
            missing = self._num_missing(request, held.groups, num_tokens + 1)
            if self._are_free(self._num_taken(missing)):
                return self._extend(request, held, missing)
        missing = self._num_missing(request, held.groups, num_tokens)
        if not self._are_free(self._num_taken(missing)):
            return None
        return self._extend(request, held, missing)

    def will_have_room_for(self, request: Request, num_new_tokens: int) -> bool:
        """Whether `allocate_slots` of a running request will succeed once the steps in flight are done."""
        held = self._held[request.req_id]
        missing = self._num_missing(request, held.groups, request.num_computed_tokens + num_new_tokens)
        return all(
            count <= pool.num_free_blocks + pool.num_pending_blocks
            for count, pool in zip(self._num_taken(missing), self.pools, strict=True)
        )

    def can_decode(self, num_requests: int) -> bool:
        """Whether so many running requests can get a block of positions each, in all groups."""
        return self._are_free(self._num_taken([num_requests] * len(self.groups)))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> list[KVCacheBlock]:
        """Add the request's full blocks of its first `num_computed_tokens` known tokens to the prefix cache.

        Returns the newly cached blocks.
        """
        shared: list[KVCacheBlock] = []
        if num_computed_tokens < request.next_cache_at:
            return shared
        held = self._held[request.req_id]
        self._hasher.extend(request)
        hashes = request.block_hashes
        request.next_cache_at = start = _NEVER
        for index, group in enumerate(self.groups):
            first, end = held.num_cached[index], num_computed_tokens // group.block_size
            if first < end:
                held.num_cached[index] = end
                start = min(start, first * group.block_size)
                shared += group.cache(held.groups[index], hashes, first, end)
            request.next_cache_at = min(request.next_cache_at, (max(first, end) + 1) * group.block_size)
        if shared:
            self.watchers.cached(request, shared, start)
        return shared

    def cache_loaded(self, request: Request, block: KVCacheBlock, key: BlockKey, index: int) -> None:
        """Add a held block, whose content was loaded for a request, to the prefix cache. index: among its blocks."""
        self.groups[key[0]].cache_loaded(block, key, index)
        self.watchers.loaded(request, block, index)

    def share_next(self, request: Request, num_computed_tokens: int, num_tokens: int) -> Sequence[KVCacheBlock]:
        """Cache the blocks that the request's next tokens fill, for requests of the same step on.

        Attention backends support that for prefill chunks of more than one token only.
        """
        if num_tokens == 1 or not self._shares_in_step:
            return ()
        return self.cache_blocks(request, min(num_computed_tokens + num_tokens, request.num_tokens))

    def forget_content(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Evict blocks whose content was not computed."""
        for block in blocks:
            if block.key is not None:
                self.groups[block.key[0]].pool.forget_content((block,))

    def forget(self, request: Request) -> None:
        """Evict all blocks that a request computed or read, whose KV may hold NaN.

        Its prefix may be finite. But finite logits after a block do not show that, since layers with sliding windows do
        not read all blocks.
        """
        hashes = request.block_hashes
        for group in self.groups:
            num_blocks = len(hashes) * self._hasher.block_size // group.block_size
            keys = group.keys(hashes, 0, num_blocks)
            for key in keys:
                group.pool.forget(key)
            self.watchers.forgotten(keys)

    def free(self, request: Request) -> None:
        """Free all blocks of a request; cached ones can be hit until they are reused."""
        held = self._held.pop(request.req_id)
        request.kv_capacity, request.next_cache_at = 0, _NEVER
        for pool, blocks in zip(self.pools, self._last_first(held), strict=True):
            pool.free_blocks(blocks)

    def take_back(self, request: Request) -> None:
        """Free all blocks, if any, of a request whose next step was not built.

        Evicts the blocks cached for that step, since no step computes them.
        """
        held = self._held.get(request.req_id)
        if held is None:
            return
        for index, group in enumerate(self.groups):
            first = max(held.num_found[index], request.num_computed_tokens // group.block_size)
            group.pool.forget_content(held.groups[index][first : held.num_cached[index]])
        self.free(request)

    def hold_blocks(self, req_id: str, holder: str) -> None:
        """Hold the current blocks of a request until `release_blocks`, even if the request ends.

        holder: name of the reader or writer, such as a transfer. Raises LifecycleError when the request has no blocks,
        or the holder holds some of it already.
        """
        held = self._held.get(req_id)
        if held is None:
            raise LifecycleError(f"{holder!r} cannot hold blocks of request {req_id!r}, which has none.")
        if (req_id, holder) in self._holds:
            raise LifecycleError(f"{holder!r} holds blocks of request {req_id!r} already. Release them first.")
        self._holds[req_id, holder] = self._last_first(held)
        for pool, blocks in zip(self.pools, self._holds[req_id, holder], strict=True):
            pool.touch(blocks)

    def is_transferring(self, req_id: str) -> bool:
        """Whether `hold_blocks` keeps blocks of a request of this id, which may have ended."""
        return any(held_id == req_id for held_id, _ in self._holds)

    def release_blocks(self, req_id: str, holder: str) -> None:
        """Release the blocks of `hold_blocks`. Raises LifecycleError when there are none."""
        of_pools = self._holds.pop((req_id, holder), None)
        if of_pools is None:
            raise LifecycleError(f"{holder!r} holds no blocks of request {req_id!r}.")
        for pool, blocks in zip(self.pools, of_pools, strict=True):
            pool.free_blocks(blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block is free, pending, or held as often as its holders say.

        Linear in the number of blocks.
        """
        null_blocks = {pool.null_block for pool in self.pools}
        num_holders = self.single_blocks.num_holders.copy()
        groups_of: dict[KVCacheBlock, set[int]] = {}
        for held in self._held.values():
            for index, (own, blocks) in enumerate(zip(held.own, held.groups, strict=True)):
                assert null_blocks.isdisjoint(own)
                num_holders.update([*own, *blocks])
                for block in {*own, *blocks} - null_blocks:
                    assert self.groups[index].pool.blocks[block.block_id] is block
                    groups_of.setdefault(block, set()).add(index)
        for of_pools in self._holds.values():
            num_holders.update(block for blocks in of_pools for block in blocks)
        assert all(len(indices) == 1 for indices in groups_of.values())
        for pool in self.pools:
            pool.check_integrity({block: num_holders[block] for block in pool.blocks[1:] if block in num_holders})

    def start_over(self) -> None:
        """Reset for a new worker: all cached prefixes are lost, and no step is in flight."""
        for pool in self.pools:
            pool.start_over()
        self.watchers.reset()

    def reset_prefix_cache(self) -> bool:
        """Evict all cached prefixes. Does nothing and returns False while any request holds blocks."""
        if self.num_used_blocks:
            return False
        for pool in self.pools:
            pool.reset_prefix_cache()
        self.watchers.reset()
        return True

    def begin_weights(self, weights: str) -> None:
        """Let blocks of all further KV have keys with the name of these weights."""
        self._hasher.begin_weights(weights)

    def _allocate_first(self, request: Request, num_new_tokens: int, hit: PrefixHit) -> tuple[list[int], ...] | None:
        groups = [list(blocks) for blocks in hit.blocks]
        missing = self._num_missing(request, groups, hit.num_tokens + num_new_tokens)
        counts = self._num_taken(missing)
        for index, group, blocks in zip(self._pool_indices, self.groups, groups):  # noqa: B905
            # Blocks of the hit that are free are taken too.
            counts[index] += group.num_own_blocks_of(request) + (group.pool.count_free(blocks) if blocks else 0)
        if not self._are_free(counts):
            return None
        for index, (group, blocks) in enumerate(zip(self.groups, groups)):  # noqa: B905
            try:
                group.pool.touch(blocks)
            except BaseException:
                for earlier, taken in zip(self.groups[:index], groups):  # noqa: B905
                    earlier.pool.free_blocks(taken)
                raise
        held = self._held[request.req_id] = _HeldBlocks(request, groups)
        for group, own in zip(self.groups, held.own):  # noqa: B905
            if group.num_own_blocks:
                own += group.pool.get_new_blocks(group.num_own_blocks_of(request))
        if self.caches_prefixes:
            request.next_cache_at = 0
            for index, state_group in self._state_groups.items():
                is_one_earlier = self._blocks_need_next_token
                held.trails[index] = state_group.begin_trail(request, len(groups[index]), is_one_earlier=is_one_earlier)
        else:
            request.next_cache_at = _NEVER
        return self._extend(request, held, missing)

    def _num_missing(self, request: Request, groups: Sequence[list[KVCacheBlock]], num_tokens: int) -> list[int]:
        return [
            max(0, group.num_blocks(request, num_tokens, self._num_lookahead_tokens) - len(blocks))
            for group, blocks in zip(self.groups, groups)  # noqa: B905
        ]

    def _num_taken(self, missing: Sequence[int]) -> list[int]:
        """Blocks of each pool that so many further blocks of positions per group take."""
        counts = [0] * len(self.pools)
        for index, group, count in zip(self._pool_indices, self.groups, missing):  # noqa: B905
            if group.takes_blocks:
                counts[index] += count
        return counts

    def _by_pool(self, counts: Sequence[int]) -> list[int]:
        """Sums of the groups' counts by pool."""
        sums = [0] * len(self.pools)
        for index, count in zip(self._pool_indices, counts):  # noqa: B905
            sums[index] += count
        return sums

    def _are_free(self, counts: Sequence[int]) -> bool:
        """Whether each pool has so many free blocks."""
        # A generator takes longer than the comparison.
        for pool, count in zip(self.pools, counts):  # noqa: B905, SIM110
            if count > pool.num_free_blocks:
                return False
        return True

    def _extend(self, request: Request, held: _HeldBlocks, missing: Sequence[int]) -> tuple[list[int], ...]:
        new_block_ids: list[list[int]] = []
        capacity = _UNLIMITED
        for group, blocks, num_blocks in zip(self.groups, held.groups, missing):  # noqa: B905
            pool = group.pool
            new_blocks = pool.get_new_blocks(num_blocks) if group.takes_blocks else [pool.null_block] * num_blocks
            blocks += new_blocks
            new_block_ids.append([block.block_id for block in new_blocks])
            capacity = min(capacity, group.capacity(request, len(blocks), self._num_lookahead_tokens))
        request.kv_capacity = capacity
        # After all blocks that are needed.
        for index, trail in held.trails.items():
            if missing[index]:
                blocks = held.groups[index]
                first = len(blocks) - missing[index]
                self._state_groups[index].take_snapshots(blocks, first, trail)
                new_block_ids[index] = [block.block_id for block in blocks[first:]]
        return tuple(new_block_ids)

    def _last_first(self, held: _HeldBlocks) -> list[list[KVCacheBlock]]:
        """Return the blocks of each pool in order of reuse, null blocks included."""
        by_pool = []
        for indices in self._groups_of_pools:
            if len(indices) == 1:
                blocks = held.groups[indices[0]][::-1]
            else:
                by_position = zip_longest(*(held.groups[index] for index in indices))
                blocks = [block for blocks in reversed(list(by_position)) for block in blocks if block is not None]
            for index in indices:
                blocks += held.own[index]
            by_pool.append(blocks)
        return by_pool

    def _free_skipped(self, held: _HeldBlocks, groups: Iterable[tuple[int, KVCacheGroup]]) -> None:
        """Release the leading blocks of groups that no later token reads."""
        # However many draft tokens in flight are rejected, all known tokens but the last stay computed.
        num_computed_tokens = min(held.request.num_computed_tokens, held.request.num_tokens)
        for index, group in groups:
            blocks, first, end = (
                held.groups[index],
                held.num_passed[index],
                group.num_skipped_blocks(num_computed_tokens),
            )
            if not group.takes_blocks:
                # A snapshot is kept until it can be found.
                end = min(end, held.num_cached[index])
            if first >= end or first >= len(blocks):
                continue
            passed = blocks[first:end]
            held.num_passed[index] = first + len(passed)
            blocks[first:end] = [group.pool.null_block] * len(passed)
            group.pool.free_blocks(reversed(passed))
            if index in held.trails:
                self._state_groups[index].note_passed(passed, first, held.trails[index])

    def _let_go_of_snapshots(self) -> bool:
        """Release the snapshots that running requests have passed; True."""
        for held in self._held.values():
            self._free_skipped(held, self._state_groups.items())
        return True
