"""KV cache groups: block counts, prefix-cache hits and skipped blocks by kind of layer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from penstock.contract import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from penstock.errors import UnsupportedFeature
from penstock.scheduler.block_pool import BlockKey, BlockPool, KVCacheBlock
from penstock.scheduler.request import Request

UNLIMITED = sys.maxsize


class KVCacheGroup:
    """Layers that share a block table. The manager keeps the block tables of requests.

    By default a block holds the KV of token positions, all of which are read until the end of the request.

    block_size: positions per block.
    hash_block_size: tokens per block hash, a divisor of the block size of groups with a prefix cache.
    finds_prefixes: whether the group supports prefix caching.
    shares_in_step: whether a request can read a block in the step that fills it for another request. A layer that
        computes requests one after another, such as a recurrent one, cannot.
    """

    finds_prefixes: ClassVar[bool] = True
    shares_in_step: ClassVar[bool] = True

    def __init__(self, group_id: int, spec: Any, pool: BlockPool, hash_block_size: int) -> None:
        self.group_id = group_id
        self.block_size: int = spec.block_size
        self._spec = spec
        self._pool = pool
        self._hashes_per_block = self.block_size // hash_block_size

    def num_blocks(self, request: Request, num_tokens: int, lookahead: int) -> int:
        """Return the blocks of the request's first `num_tokens`, skipped ones included.

        lookahead: tokens beyond these that a speculator may write, up to the request's length limit.
        """
        num_positions = min(num_tokens + lookahead, max(num_tokens, request.length_limit)) if lookahead else num_tokens
        return -(-num_positions // self.block_size)

    def num_blocks_at_once(self, request: Request, num_tokens: int, max_new_tokens: int, lookahead: int) -> int:
        """Return the maximum of blocks held at once up to `num_tokens`, in steps of `max_new_tokens`."""
        return self._spec.max_blocks_per_request(num_tokens, max_new_tokens + lookahead)  # type: ignore[no-any-return]

    def capacity(self, num_blocks: int) -> int:
        """Return the tokens of a request for which so many blocks are enough."""
        return num_blocks * self.block_size

    def key(self, block_hashes: Sequence[bytes], index: int) -> BlockKey:
        """Return the prefix-cache key of block `index`: the last hash inside it covers all tokens up to its end."""
        return self.group_id, block_hashes[(index + 1) * self._hashes_per_block - 1]

    def find(self, block_hashes: Sequence[bytes], index: int) -> KVCacheBlock | None:
        """Return a cached block for block `index`, if there is one."""
        return self._pool.find(self.key(block_hashes, index))

    def find_hit(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[KVCacheBlock]:
        """Return the blocks of the longest prefix-cache hit of at most `max_num_tokens`.

        Null blocks stand for those that will not be read.
        """
        return []

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Return the leading blocks that no later token reads, once so many positions are computed."""
        return 0


class FullAttentionGroup(KVCacheGroup):
    """Full attention: every position is read by all later ones."""

    def find_hit(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = []
        for index in range(max_num_tokens // self.block_size):
            block = self.find(block_hashes, index)
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
        return [self._pool.null_block] * (end - len(run)) + run

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return self._spec.first_read(num_computed_tokens) // self.block_size  # type: ignore[no-any-return]


class FixedGroup(KVCacheGroup):
    """Base of groups with a fixed number of blocks per request, which are never shared."""

    finds_prefixes = False

    def num_blocks_at_once(self, request: Request, num_tokens: int, max_new_tokens: int, lookahead: int) -> int:
        return self.num_blocks(request, num_tokens, lookahead)

    def capacity(self, num_blocks: int) -> int:
        return UNLIMITED


class EncoderGroup(FixedGroup):
    """Cross attention: positions of the encoder, written before the first token and read by all tokens."""

    def num_blocks(self, request: Request, num_tokens: int, lookahead: int) -> int:
        return -(-request.num_encoder_tokens // self.block_size)


class StateGroup(FixedGroup):
    """Recurrent state: one block per request, and one per lookahead token, so that a state can be rolled back."""

    def num_blocks(self, request: Request, num_tokens: int, lookahead: int) -> int:
        return 1 + lookahead


# Group classes by KV cache spec.
GROUPS: dict[type[Any], type[KVCacheGroup]] = {
    FullAttentionSpec: FullAttentionGroup,
    MLAAttentionSpec: FullAttentionGroup,
    SlidingWindowSpec: LocalAttentionGroup,
    ChunkedLocalSpec: LocalAttentionGroup,
    CrossAttentionSpec: EncoderGroup,
    RecurrentStateSpec: StateGroup,
}


def register_kv_cache_group(spec_type: type[Any], group_type: type[KVCacheGroup]) -> None:
    """Register the group class of a plugin's KV cache spec."""
    GROUPS[spec_type] = group_type


def make_group(group_id: int, spec: KVCacheSpec, pool: BlockPool, hash_block_size: int) -> KVCacheGroup:
    """Create the group of a spec. Raises UnsupportedFeature for an unknown spec."""
    group_type = GROUPS.get(type(spec))
    if group_type is None:
        raise UnsupportedFeature(
            f"No KV cache group is registered for {type(spec).__name__}. Register one: register_kv_cache_group."
        )
    return group_type(group_id, spec, pool, hash_block_size)
