"""KV cache specs of layers, groups of layers with a shared block table, and the memory layout.

A *spec* is the KV cache layout of one layer: bytes per block (a *page*), and the positions that are kept. The attention
backend defines a page's content. Layers with equal specs form a *group* that shares one block table. All groups draw
block ids from one pool, so all pages have the same size in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import ClassVar, Literal, Self, TypeAlias

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
# The int8 KV cache has a float32 scale per position and head, after its block.
SCALE_BYTES = {"int8": 4}
# Block size of state kept once per request: more positions than any request has.
WHOLE_REQUEST = 1 << 30


def head_elements(head_size: int, dtype: str) -> int:
    """Return the elements of one head's key or value at one position, its scale included."""
    return head_size + SCALE_BYTES.get(dtype, 0) // DTYPE_BYTES[dtype]


class _PositionsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Spec of per-position KV in blocks of `block_size` positions.

    num_ranks: decode-context-parallel ranks, each with an equal part of a block's positions, under the same block ids.
    """

    _vectors_per_head: ClassVar[int] = 2

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
    """Cross attention: KV of the encoder's positions, per request, without prefix caching.

    max_num_encoder_tokens: maximum encoder positions of a request.
    """

    max_num_encoder_tokens: int

    def table_width(self, max_model_len: int) -> int:
        """Return the blocks of encoder positions in a row of a block table."""
        return math.ceil(self.max_num_encoder_tokens / self.block_size)


class _LocalSpec(_PositionsSpec, frozen=True, kw_only=True):
    """Spec of layers that read a limited number of positions."""

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
    """Recurrent state: one page per request, changed by every step, without prefix caching.

    state_bytes: size of the state; padding fills the page.
    """

    state_bytes: int
    padding_bytes: int = 0

    @property
    def block_size(self) -> int:
        """Positions per block: all of a request."""
        return WHOLE_REQUEST

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.state_bytes + self.padding_bytes

    def with_pages_of(self, page_size_bytes: int) -> Self | None:
        """Return the spec padded to pages of this size; None if the state is larger."""
        padding = page_size_bytes - self.state_bytes
        return None if padding < 0 else msgspec.structs.replace(self, padding_bytes=padding)

    def table_width(self, max_model_len: int) -> int:
        """Return the blocks in a row of a block table."""
        return 1

    def max_blocks_per_request(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Return the maximum number of blocks that a request holds at once."""
        return 1


LocalAttentionSpec: TypeAlias = SlidingWindowSpec | ChunkedLocalSpec
AttentionSpec: TypeAlias = FullAttentionSpec | LocalAttentionSpec | MLAAttentionSpec
KVCacheSpec: TypeAlias = AttentionSpec | CrossAttentionSpec | RecurrentStateSpec


class KVCacheGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec


class KVCacheTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Allocation shared by layers of different groups, since no block id is in two groups at once."""

    size_bytes: int
    shared_by: tuple[str, ...]


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """KV cache of `num_blocks` block ids (id 0 is the null block, never allocated)."""

    num_blocks: int
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroupSpec, ...]

    def of_layers(self, names: Container[str]) -> KVCacheConfig:
        """Return the config of a worker with these layers alone: all groups, each with its layers there."""

        def kept(layer_names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for name in layer_names if name in names)

        tensors = (msgspec.structs.replace(tensor, shared_by=kept(tensor.shared_by)) for tensor in self.tensors)
        groups = (msgspec.structs.replace(group, layer_names=kept(group.layer_names)) for group in self.groups)
        return KVCacheConfig(
            num_blocks=self.num_blocks,
            tensors=tuple(tensor for tensor in tensors if tensor.shared_by),
            groups=tuple(groups),
        )

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)
