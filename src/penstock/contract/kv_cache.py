"""KV cache specs of layers, groups of layers with a shared block table, and the memory layout.

A *spec* is the KV cache layout of one layer: bytes per block (a *page*), and the positions that are kept. The attention
backend defines a page's content. Layers with equal specs form a *group* that shares one block table. Groups whose pages
have one size draw block ids from one *pool*; pages of another size have a pool of their own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Container
from typing import ClassVar, Literal, Self, TypeAlias

import msgspec

from penstock.config.cache import Snapshots

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
# The int8 KV cache has a float32 scale per position and head, after its block.
SCALE_BYTES = {"int8": 4}
# Module of the classes that manage the blocks of each kind of spec, which a spec names as "module:name".
_GROUPS = "penstock.scheduler.kv_cache_groups"


def head_elements(head_size: int, dtype: str) -> int:
    """Return the elements of one head's key or value at one position, its scale included."""
    return head_size + SCALE_BYTES.get(dtype, 0) // DTYPE_BYTES[dtype]


class _PositionsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Spec of per-position KV in blocks of `block_size` positions.

    kv_cache_group: class of the scheduler that manages the blocks, as "module:name".

    num_ranks: decode-context-parallel ranks, each with an equal part of a block's positions, under the same block ids.
    """

    kv_cache_group: ClassVar[str] = f"{_GROUPS}:FullAttentionGroup"
    _vectors_per_head: ClassVar[int] = 2
    # Columns of a block table before those of positions.
    num_own_blocks: ClassVar[int] = 0

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    num_ranks: int = 1

    @property
    def elements_per_head(self) -> int:
        """Elements of one key or value vector of a head at one position."""
        return head_elements(self.head_size, self.dtype)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer, on each rank."""
        vector_bytes = self.elements_per_head * DTYPE_BYTES[self.dtype]
        return self._vectors_per_head * self.positions_per_page * self.num_kv_heads * vector_bytes

    @property
    def positions_per_page(self) -> int:
        """Positions of a block on one rank."""
        return self.block_size // self.num_ranks

    def with_pages_of(self, page_size_bytes: int) -> Self | None:
        """Return the spec with a block size for pages of this size; None if it is not a multiple."""
        ratio, rest = divmod(page_size_bytes, self.page_size_bytes)
        return None if rest else msgspec.structs.replace(self, block_size=self.block_size * ratio)

    def table_width(self, max_model_len: int) -> int:
        """Return the blocks in a row of a block table, skipped ones included."""
        return math.ceil(max_model_len / self.block_size)

    def capacity(self, num_blocks: int) -> int:
        """Return the positions that so many blocks in a row of a block table are enough for."""
        return num_blocks * self.block_size

    def blocks_of_one_request(self, num_tokens: int) -> list[int]:
        """Return a row of a block table for a request that has the pool to itself."""
        return list(range(1, 1 + math.ceil(num_tokens / self.block_size)))

    def max_blocks_per_request(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Return the maximum number of blocks that a request holds at once."""
        return self.table_width(max_model_len)

    def first_read(self, position: int) -> int:
        """Return the first position that the token at `position` reads."""
        return 0


class FullAttentionSpec(_PositionsSpec, frozen=True, kw_only=True, tag=True):
    """Full attention: KV of every position."""


class MLAAttentionSpec(_PositionsSpec, frozen=True, kw_only=True, tag=True):
    """Multi-head latent attention: one latent vector per position, shared by all query heads.

    head_size: qk_rope_head_dim + kv_lora_rank: the rotary part of the key, and the compressed latent (DeepSeek-V2,
        arXiv:2405.04434, section 2.1).
    """

    _vectors_per_head: ClassVar[int] = 1

    num_kv_heads: Literal[1] = 1


class CrossAttentionSpec(_PositionsSpec, frozen=True, kw_only=True, tag=True):
    """Cross attention: KV of the encoder's output, written once and read by all of a request's tokens.

    The blocks are a request's own, as many as its source has positions for; columns of positions follow, which are
    never read.

    max_source_positions: positions of the longest source, the encoder's output for a request.
    """

    kv_cache_group: ClassVar[str] = f"{_GROUPS}:CrossAttentionGroup"

    max_source_positions: int

    @property
    def num_own_blocks(self) -> int:  # type: ignore[override]
        """Blocks of the longest source."""
        return self.blocks_of_source(self.max_source_positions)

    def blocks_of_source(self, source_length: int) -> int:
        """Return the blocks of a source of so many positions."""
        return math.ceil(source_length / self.block_size)

    def table_width(self, max_model_len: int) -> int:
        return self.num_own_blocks + math.ceil(max_model_len / self.block_size)

    def capacity(self, num_blocks: int) -> int:
        """Return the positions of the decoder, which need no blocks."""
        return sys.maxsize

    def blocks_of_one_request(self, num_tokens: int) -> list[int]:
        return [*range(1, 1 + self.num_own_blocks), *[0] * math.ceil(num_tokens / self.block_size)]

    def max_blocks_per_request(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        return self.num_own_blocks


class _LocalSpec(_PositionsSpec, frozen=True, kw_only=True):
    """Spec of layers that read a limited number of positions."""

    kv_cache_group: ClassVar[str] = f"{_GROUPS}:LocalAttentionGroup"

    @property
    def num_read(self) -> int:
        """Maximum number of positions that a token reads, the current one included."""
        raise NotImplementedError

    def max_blocks_per_request(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Return the maximum number of blocks that a request holds at once."""
        positions = min(self.num_read - 1 + max_num_batched_tokens, max_model_len)
        # One more, since the first position need not be the first of a block.
        blocks = math.ceil(positions / self.block_size) + 1
        return min(blocks, self.table_width(max_model_len))


class SlidingWindowSpec(_LocalSpec, frozen=True, kw_only=True, tag=True):
    """Sliding window: KV of the last `sliding_window` positions (the current one included)."""

    sliding_window: int

    @property
    def num_read(self) -> int:
        return self.sliding_window

    def first_read(self, position: int) -> int:
        return max(0, position - self.sliding_window + 1)


class ChunkedLocalSpec(_LocalSpec, frozen=True, kw_only=True, tag=True):
    """Chunked local attention: KV of the positions of a chunk of `chunk_size`, up to the current one (Llama 4)."""

    chunk_size: int

    @property
    def num_read(self) -> int:
        return self.chunk_size

    def first_read(self, position: int) -> int:
        return position - position % self.chunk_size


class RecurrentStateSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Recurrent state: a page per state.

    A row of a block table has `num_own_blocks` blocks of the request's own: the state after position p is in block
    p % num_own_blocks, so that the states before rejected drafts are still there. A column per `block_size` positions
    follows: the block of a snapshot, the state after the last of these positions; 0 where there is none. A request that
    begins at a border has the snapshot there, which others may share and no step writes again.

    state_bytes: size of a state. block_size: positions between two borders.
    snapshots: borders at which requests leave snapshots: "align", where later requests may begin (ends of prompts and
        turns, and of shared prefixes); "all"; "none".
    rolls_back: whether the layer keeps the states of a step's last `num_own_blocks` positions, so that drafts can be
        rejected. max_drafts: draft tokens of a request in a step.
    """

    kv_cache_group: ClassVar[str] = f"{_GROUPS}:StateGroup"

    state_bytes: int
    block_size: int
    snapshots: Snapshots = "align"
    rolls_back: bool = False
    max_drafts: int = 0

    @property
    def num_own_blocks(self) -> int:
        """Blocks that a request has for itself."""
        return 1 + self.max_drafts

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.state_bytes

    def table_width(self, max_model_len: int) -> int:
        """Return the blocks in a row of a block table, absent snapshots included."""
        return self.num_own_blocks + math.ceil(max_model_len / self.block_size)

    def capacity(self, num_blocks: int) -> int:
        """Return the positions that so many blocks in a row of a block table are enough for: up to the next border."""
        return (num_blocks - self.num_own_blocks + 1) * self.block_size - 1

    def blocks_of_one_request(self, num_tokens: int) -> list[int]:
        """Return a row of a block table, without snapshots, for a request that has the pool to itself."""
        return [*range(1, 1 + self.num_own_blocks), *[0] * math.ceil(num_tokens / self.block_size)]

    def max_blocks_per_request(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Return the maximum number of blocks that a request needs at once: its own, and the snapshot to begin from."""
        return self.num_own_blocks + (self.snapshots != "none")


LocalAttentionSpec: TypeAlias = SlidingWindowSpec | ChunkedLocalSpec
AttentionSpec: TypeAlias = FullAttentionSpec | LocalAttentionSpec | MLAAttentionSpec | CrossAttentionSpec
KVCacheSpec: TypeAlias = AttentionSpec | RecurrentStateSpec


class KVCacheGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table. pool: index of the pool of its blocks."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    pool: int = 0


class KVCacheTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Allocation shared by layers of different groups, since no block id is in two groups at once."""

    size_bytes: int
    shared_by: tuple[str, ...]


class KVCachePool(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of `num_blocks` block ids, whose pages have one size (id 0 is the null block, never allocated)."""

    num_blocks: int
    tensors: tuple[KVCacheTensor, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """KV cache: pools of blocks, and the groups that draw from them. No pool without any layer that keeps something."""

    pools: tuple[KVCachePool, ...] = ()
    groups: tuple[KVCacheGroupSpec, ...] = ()

    def of_layers(self, names: Container[str]) -> KVCacheConfig:
        """Return the config of a worker with these layers alone: all groups, each with its layers there."""

        def kept(layer_names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for name in layer_names if name in names)

        replace = msgspec.structs.replace
        pools = []
        for pool in self.pools:
            tensors = [replace(tensor, shared_by=kept(tensor.shared_by)) for tensor in pool.tensors]
            pools.append(replace(pool, tensors=tuple(tensor for tensor in tensors if tensor.shared_by)))
        groups = (replace(group, layer_names=kept(group.layer_names)) for group in self.groups)
        return KVCacheConfig(pools=tuple(pools), groups=tuple(groups))

    def num_blocks_of(self, group: int) -> int:
        """Return the number of block ids of a group's pool."""
        return self.pools[self.groups[group].pool].num_blocks

    def block_bytes_of(self, group: int) -> int:
        """Return the bytes of a group's block."""
        spec = self.groups[group]
        pool, names = self.pools[spec.pool], set(spec.layer_names)
        tensors = (tensor for tensor in pool.tensors if not names.isdisjoint(tensor.shared_by))
        return sum(tensor.size_bytes // pool.num_blocks for tensor in tensors)

    @property
    def size_bytes(self) -> int:
        return sum(pool.size_bytes for pool in self.pools)
