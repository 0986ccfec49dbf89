"""KV cache manager: block tables of requests, and the prefix cache."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import cycle, zip_longest

from penstock.contract import KVCacheConfig
from penstock.errors import LifecycleError
from penstock.scheduler.block_hash import BlockHasher
from penstock.scheduler.block_pool import BlockPool, KVCacheBlock
from penstock.scheduler.kv_cache_groups import UNLIMITED, KVCacheGroup, make_group
from penstock.scheduler.request import Request

_NEVER = sys.maxsize


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Prefix-cache hit: its length in tokens, and its blocks per group, not yet held."""

    num_tokens: int
    blocks: tuple[list[KVCacheBlock], ...]


class _HeldBlocks:
    """Block table of one request.

    groups: per group, blocks by position; the null block where positions are no longer read.
    num_found: per group, leading blocks of the prefix-cache hit.
    num_cached: per group, leading blocks that are in the prefix cache.
    """

    __slots__ = ("groups", "num_cached", "num_found")

    def __init__(self, groups: list[list[KVCacheBlock]]) -> None:
        self.groups = groups
        self.num_found = tuple(len(blocks) for blocks in groups)
        self.num_cached = list(self.num_found)


class KVCacheManager:
    """Allocates blocks for requests, frees them, and shares equal prefixes among requests.

    A block is cached once it is full of known tokens that are computed, or scheduled: a request may read a block that
    another one writes in the same step. The scheduler evicts blocks that were not computed after all.

    num_lookahead_tokens: tokens beyond those of a step that a speculator may write.
    blocks_need_next_token: whether the KV of a block's last token depends on the token after it too, as with an EAGLE
        head. Then the last block of a prefix-cache hit is computed anew, since another token may follow it.
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
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_lookahead_tokens = num_lookahead_tokens
        self._blocks_need_next_token = blocks_need_next_token
        # A null block exists even without any KV cache.
        self.pool = BlockPool(max(1, kv_cache_config.num_blocks))
        specs = [group.spec for group in kv_cache_config.groups]
        hash_block_size = math.gcd(*(spec.block_size for spec in specs)) or 1
        self._hasher = BlockHasher(hash_block_size)
        self.groups: list[KVCacheGroup] = [
            make_group(index, spec, self.pool, hash_block_size) for index, spec in enumerate(specs)
        ]
        can_cache = bool(self.groups) and all(group.finds_prefixes for group in self.groups)
        self._caches_prefixes = enable_prefix_caching and can_cache
        self._shares_in_step = all(group.shares_in_step for group in self.groups)
        self._no_hit = PrefixHit(0, tuple([] for _ in self.groups))
        self._held: dict[str, _HeldBlocks] = {}
        # Blocks held by transfers, by request id and holder.
        self._holds: dict[tuple[str, str], list[KVCacheBlock]] = {}

    def blocks_needed(self, request: Request, num_tokens: int) -> int:
        """Return the maximum number of blocks, of all groups, that the request holds at this length."""
        max_new_tokens, lookahead = self._max_num_batched_tokens, self._num_lookahead_tokens
        return sum(group.num_blocks_at_once(request, num_tokens, max_new_tokens, lookahead) for group in self.groups)

    def holds(self, request: Request) -> bool:
        """Whether the request has blocks: it runs, or waits with reserved ones."""
        return request.req_id in self._held

    def holds_any(self, request: Request, blocks: Set[KVCacheBlock]) -> bool:
        """Whether the request has one of these blocks."""
        return any(not blocks.isdisjoint(of_group) for of_group in self._held[request.req_id].groups)

    def whole_blocks(self, num_tokens: int) -> int:
        """Round down to a number of tokens that fills whole blocks in all groups."""
        return num_tokens - num_tokens % math.lcm(*(group.block_size for group in self.groups))

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...]:
        """Return the block ids of a request, per group and by position; 0 where positions are no longer read."""
        return tuple([block.block_id for block in blocks] for blocks in self._held[req_id].groups)

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """Return the longest prefix-cache hit before the last known token: at least one token must run.

        No hit where prompt log-probabilities or pooling need the whole prompt. For a waiting request with reserved
        blocks, the tokens loaded there.
        """
        held = self._held.get(request.req_id)
        if held is not None:
            return PrefixHit(request.num_computed_tokens, tuple(blocks.copy() for blocks in held.groups))
        if not self._caches_prefixes or request.needs_all_of_prompt:
            return self._no_hit
        self._hasher.extend(request)
        hit = self._longest_hit(request.block_hashes, request.num_tokens - 1)
        if self._blocks_need_next_token and hit.num_tokens:
            return self._longest_hit(request.block_hashes, hit.num_tokens - 1)
        return hit

    def _longest_hit(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> PrefixHit:
        """Return the longest prefix-cache hit of at most so many tokens."""
        length = max_num_tokens
        hits: list[list[KVCacheBlock]] = [[] for _ in self.groups]
        # Each group may shorten the hit, until all agree.
        num_agreeing = 0
        for index, group in cycle(enumerate(self.groups)):
            hits[index] = group.find_hit(block_hashes, length)
            found = len(hits[index]) * group.block_size
            num_agreeing = num_agreeing + 1 if found == length else 1
            length = found
            if num_agreeing == len(self.groups):
                break
        return PrefixHit(length, tuple(hits))

    def has_room_for(self, request: Request, hit: PrefixHit) -> bool:
        """Whether the free blocks suffice for all known tokens of a request.

        A request admitted with room for its first prefill chunk only would soon be preempted for its second.
        """
        num_shared = sum(
            block is not self.pool.null_block and not self.pool.is_free(block)
            for blocks in hit.blocks
            for block in blocks
        )
        return self.blocks_needed(request, request.num_tokens) - num_shared <= self.pool.num_free_blocks

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
        # However many draft tokens in flight are rejected, all known tokens but the last stay computed.
        num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
        for group, blocks in zip(self.groups, held.groups):  # noqa: B905, as in `StepsInFlight.settle`
            if num_skipped := group.num_skipped_blocks(num_computed_tokens):
                self._free_skipped(blocks, num_skipped)
        missing = self._num_missing(request, held.groups, num_tokens)
        if sum(missing) > self.pool.num_free_blocks:
            return None
        return self._extend(request, held, missing)

    def will_have_room_for(self, request: Request, num_new_tokens: int) -> bool:
        """Whether `allocate_slots` of a running request will succeed once the steps in flight are done."""
        held = self._held[request.req_id]
        missing = self._num_missing(request, held.groups, request.num_computed_tokens + num_new_tokens)
        return sum(missing) <= self.pool.num_free_blocks + self.pool.num_pending_blocks

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
        request.next_cache_at = _NEVER
        for index, group in enumerate(self.groups):
            first, end = held.num_cached[index], num_computed_tokens // group.block_size
            if first < end:
                keys = [group.key(hashes, block) for block in range(first, end)]
                held.num_cached[index] = end
                shared += self.pool.cache_full_blocks(held.groups[index][first:end], keys)
            request.next_cache_at = min(request.next_cache_at, (max(first, end) + 1) * group.block_size)
        return shared

    def share_next(self, request: Request, num_computed_tokens: int, num_tokens: int) -> Sequence[KVCacheBlock]:
        """Cache the blocks that the request's next tokens fill, for requests of the same step on.

        Attention backends support that for prefill chunks of more than one token only.
        """
        if num_tokens == 1 or not self._shares_in_step:
            return ()
        return self.cache_blocks(request, min(num_computed_tokens + num_tokens, request.num_tokens))

    def forget_content(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Evict blocks whose content was not computed."""
        self.pool.forget_content(blocks)

    def forget(self, request: Request) -> None:
        """Evict all blocks that a request computed or read, whose KV may hold NaN.

        Its prefix may be finite. But finite logits after a block do not show that, since layers with sliding windows do
        not read all blocks.
        """
        hashes = request.block_hashes
        for group in self.groups:
            num_blocks = len(hashes) * self._hasher.block_size // group.block_size
            for block in range(num_blocks):
                self.pool.forget(group.key(hashes, block))

    def free(self, request: Request) -> None:
        """Free all blocks of a request; cached ones can be hit until they are reused."""
        held = self._held.pop(request.req_id)
        request.kv_capacity, request.next_cache_at = 0, _NEVER
        self.pool.free_blocks(_last_first(held.groups))

    def take_back(self, request: Request) -> None:
        """Free all blocks, if any, of a request whose next step was not built.

        Evicts the blocks cached for that step, since no step computes them.
        """
        held = self._held.get(request.req_id)
        if held is None:
            return
        for index, group in enumerate(self.groups):
            first = max(held.num_found[index], request.num_computed_tokens // group.block_size)
            self.pool.forget_content(held.groups[index][first : held.num_cached[index]])
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
        blocks = self._holds[req_id, holder] = _last_first(held.groups)
        self.pool.touch(blocks)

    def is_transferring(self, req_id: str) -> bool:
        """Whether `hold_blocks` keeps blocks of a request of this id, which may have ended."""
        return any(held_id == req_id for held_id, _ in self._holds)

    def release_blocks(self, req_id: str, holder: str) -> None:
        """Release the blocks of `hold_blocks`. Raises LifecycleError when there are none."""
        blocks = self._holds.pop((req_id, holder), None)
        if blocks is None:
            raise LifecycleError(f"{holder!r} holds no blocks of request {req_id!r}.")
        self.pool.free_blocks(blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block is free, pending, or held as often as its holders say.

        Linear in the number of blocks.
        """
        null_block = self.pool.null_block
        num_holders: Counter[KVCacheBlock] = Counter()
        groups_of: dict[KVCacheBlock, set[int]] = {}
        for held in self._held.values():
            for index, blocks in enumerate(held.groups):
                num_holders.update(blocks)
                for block in blocks:
                    groups_of.setdefault(block, set()).add(index)
        for blocks in self._holds.values():
            num_holders.update(blocks)
        del num_holders[null_block]
        assert all(len(indices) == 1 for block, indices in groups_of.items() if block is not null_block)
        self.pool.check_integrity(num_holders)

    def start_over(self) -> None:
        """Reset for a new worker: all cached prefixes are lost, and no step is in flight."""
        self.pool.start_over()

    def reset_prefix_cache(self) -> bool:
        """Evict all cached prefixes. Does nothing and returns False while any request holds blocks."""
        return self.pool.reset_prefix_cache()

    def _allocate_first(self, request: Request, num_new_tokens: int, hit: PrefixHit) -> tuple[list[int], ...] | None:
        groups = [list(blocks) for blocks in hit.blocks]
        missing = self._num_missing(request, groups, hit.num_tokens + num_new_tokens)
        num_taken = sum(self.pool.is_free(block) for blocks in groups for block in blocks)
        if sum(missing) + num_taken > self.pool.num_free_blocks:
            return None
        self.pool.touch(block for blocks in groups for block in blocks)
        held = self._held[request.req_id] = _HeldBlocks(groups)
        request.next_cache_at = 0 if self._caches_prefixes else _NEVER
        return self._extend(request, held, missing)

    def _num_missing(self, request: Request, groups: Sequence[list[KVCacheBlock]], num_tokens: int) -> list[int]:
        return [
            max(0, group.num_blocks(request, num_tokens, self._num_lookahead_tokens) - len(blocks))
            for group, blocks in zip(self.groups, groups)  # noqa: B905
        ]

    def _extend(self, request: Request, held: _HeldBlocks, missing: Sequence[int]) -> tuple[list[int], ...]:
        new_block_ids: list[list[int]] = []
        capacity = UNLIMITED
        for group, blocks, num_blocks in zip(self.groups, held.groups, missing):  # noqa: B905
            new_blocks = self.pool.get_new_blocks(num_blocks)
            blocks += new_blocks
            new_block_ids.append([block.block_id for block in new_blocks])
            capacity = min(capacity, group.capacity(len(blocks)))
        request.kv_capacity = capacity - self._num_lookahead_tokens if capacity < request.length_limit else capacity
        return tuple(new_block_ids)

    def _free_skipped(self, blocks: list[KVCacheBlock], num_skipped: int) -> None:
        null_block = self.pool.null_block
        for index in range(min(num_skipped, len(blocks)) - 1, -1, -1):
            block = blocks[index]
            if block is null_block:
                break
            blocks[index] = null_block
            self.pool.free_blocks((block,))


def _last_first(groups: Sequence[list[KVCacheBlock]]) -> list[KVCacheBlock]:
    """Return the blocks of all groups in order of reuse, null blocks included."""
    return [block for blocks in reversed(list(zip_longest(*groups))) for block in blocks if block is not None]
