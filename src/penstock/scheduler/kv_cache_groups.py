"""What differs between kinds of KV cache: which blocks a request needs, which of a prefix, and which no longer."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from penstock.contract import (
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
    """The layers that share a block table. The manager keeps the block lists of requests.

    What a block holds is up to the kind: positions of tokens, all of them needed until the end, if it does not say
    otherwise.

    block_size: positions per block, whatever a position is.
    hash_block_size: tokens per block hash of a request, a divisor of this group's block size where it finds prefixes.
    finds_prefixes: whether a request can begin with what another one computed.
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
        """Blocks of the request's first `num_tokens`, those that nobody reads any more included.

        lookahead: tokens beyond these that a speculator may write; none reaches the request's length limit.
        """
        num_positions = min(num_tokens + lookahead, max(num_tokens, request.length_limit)) if lookahead else num_tokens
        return -(-num_positions // self.block_size)

    def num_blocks_at_once(self, request: Request, num_tokens: int, max_new_tokens: int, lookahead: int) -> int:
        """Blocks that the request holds at once on the way to `num_tokens`, in steps of `max_new_tokens`, at most."""
        return self._spec.max_blocks_per_request(num_tokens, max_new_tokens + lookahead)  # type: ignore[no-any-return]

    def capacity(self, num_blocks: int) -> int:
        """Tokens of a request for which so many blocks are enough."""
        return num_blocks * self.block_size

    def key(self, block_hashes: Sequence[bytes], index: int) -> BlockKey:
        """The key of a request's block at `index`: the last hash inside it covers it and all before it."""
        return self.group_id, block_hashes[(index + 1) * self._hashes_per_block - 1]

    def find(self, block_hashes: Sequence[bytes], index: int) -> KVCacheBlock | None:
        """A cached block that holds what a request's block at `index` must hold."""
        return self._pool.find(self.key(block_hashes, index))

    def find_hit(self, block_hashes: Sequence[bytes], max_num_tokens: int) -> list[KVCacheBlock]:
        """The blocks of the longest prefix, of at most `max_num_tokens`, after which a request can go on.

        Null blocks stand for those that will not be read.
        """
        return []

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that no later token reads, once so many positions are computed."""
        return 0


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


class SlidingWindowGroup(KVCacheGroup):
    """A token reads itself and the `sliding_window - 1` positions before it."""

    def __init__(self, group_id: int, spec: SlidingWindowSpec, pool: BlockPool, hash_block_size: int) -> None:
        super().__init__(group_id, spec, pool, hash_block_size)
        self._num_earlier_positions = spec.sliding_window - 1
        self._num_earlier_blocks = math.ceil(self._num_earlier_positions / self.block_size)

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


class FixedGroup(KVCacheGroup):
    """Base of kinds whose blocks a request takes once, however many tokens follow, and shares with nobody."""

    finds_prefixes = False

    def num_blocks_at_once(self, request: Request, num_tokens: int, max_new_tokens: int, lookahead: int) -> int:
        return self.num_blocks(request, num_tokens, lookahead)

    def capacity(self, num_blocks: int) -> int:
        return UNLIMITED


class EncoderGroup(FixedGroup):
    """A position is one of the encoder's: written once, before the first token, and read by all of them."""

    def num_blocks(self, request: Request, num_tokens: int, lookahead: int) -> int:
        return -(-request.num_encoder_tokens // self.block_size)


class StateGroup(FixedGroup):
    """A block is what a recurrent layer carries from one token to the next: one per request.

    There is one more for each token of the lookahead, so that a state can be taken back.
    """

    def num_blocks(self, request: Request, num_tokens: int, lookahead: int) -> int:
        return 1 + lookahead


# By the spec of a group's layers.
GROUPS: dict[type[Any], type[KVCacheGroup]] = {
    FullAttentionSpec: FullAttentionGroup,
    MLAAttentionSpec: FullAttentionGroup,
    SlidingWindowSpec: SlidingWindowGroup,
    CrossAttentionSpec: EncoderGroup,
    RecurrentStateSpec: StateGroup,
}


def register_kv_cache_group(spec_type: type[Any], group_type: type[KVCacheGroup]) -> None:
    """Let plugins manage the blocks of layers that keep something of their own kind."""
    GROUPS[spec_type] = group_type


def make_group(group_id: int, spec: KVCacheSpec, pool: BlockPool, hash_block_size: int) -> KVCacheGroup:
    """The group that manages blocks of this kind. Raises UnsupportedFeature when there is none."""
    group_type = GROUPS.get(type(spec))
    if group_type is None:
        raise UnsupportedFeature(f"No kind of block management is known for layers that keep a {type(spec).__name__}.")
    return group_type(group_id, spec, pool, hash_block_size)
