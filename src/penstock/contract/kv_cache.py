"""What each layer keeps per token, how layers share block tables, and how the memory is laid out.

A *spec* says how many bytes one layer stores per block, which is a *page*, and for which positions. What is in a page
is the layer's own matter. Layers with equal specs form a *group* that shares one block table. All groups draw block ids
from one pool, so all pages have the same size in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import ClassVar, Literal, Self, TypeAlias

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
# int8 keys and values have a float32 scale for each position of each head, kept behind its block.
SCALE_BYTES = {"int8": 4}
# More positions than any request has: what is kept once per request is a block of so many.
WHOLE_REQUEST = 1 << 30


def head_elements(head_size: int, dtype: str) -> int:
    """Elements of the dtype that one head's key or value takes at one position, its scale included."""
    return head_size + SCALE_BYTES.get(dtype, 0) // DTYPE_BYTES[dtype]


class _PositionsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of positions, in blocks of `block_size` of them: keys and values, unless a kind says otherwise.

    num_ranks: ranks that keep the positions of a block by turns, each an equal part, with the same block ids.
    """

    _vectors_per_head: ClassVar[int] = 2

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    num_ranks: int = 1

    @property
    def elements_per_head(self) -> int:
        """Elements of the dtype that one vector of a head takes at one position."""
        return head_elements(self.head_size, self.dtype)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer, on each rank."""
        vector_bytes = self.elements_per_head * DTYPE_BYTES[self.dtype]
        return self._vectors_per_head * self.positions_per_page * self.num_kv_heads * vector_bytes

    @property
    def positions_per_page(self) -> int:
        """Of a block, those that a rank keeps."""
        return self.block_size // self.num_ranks

    def with_pages_of(self, page_size_bytes: int) -> Self | None:
        """The same with more positions per block, in pages of this size; None where no number of them makes it."""
        ratio, rest = divmod(page_size_bytes, self.page_size_bytes)
        return None if rest else msgspec.structs.replace(self, block_size=self.block_size * ratio)

    def table_width(self, max_model_len: int) -> int:
        """Blocks in a row of a block table, those that nobody reads any more included."""
        return math.ceil(max_model_len / self.block_size)

    def max_blocks_per_request(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Blocks that one request can hold at once, at most."""
        return self.table_width(max_model_len)


class FullAttentionSpec(_PositionsSpec, frozen=True, kw_only=True, tag=True):
    """Keys and values of every position."""


class MLAAttentionSpec(_PositionsSpec, frozen=True, kw_only=True, tag=True):
    """One vector for every position, of which all heads make their keys and values (multi-head latent attention).

    head_size: kv_lora_rank + qk_rope_head_dim: the compressed latent, and the part of the key that is rotated
        (DeepSeek-V2, arXiv:2405.04434, section 2.1). There is one such head, however many query heads read it.
    """

    _vectors_per_head: ClassVar[int] = 1

    num_kv_heads: Literal[1] = 1


class CrossAttentionSpec(_PositionsSpec, frozen=True, kw_only=True, tag=True):
    """Keys and values of the encoder's positions, which all tokens of a request read.

    They are the request's own, since its tokens' keys and values depend on them: no prefix is looked up.

    max_num_encoder_tokens: positions of the encoder that one request has, at most.
    """

    max_num_encoder_tokens: int

    def table_width(self, max_model_len: int) -> int:
        """Blocks in a row of a block table: of encoder positions, however many tokens there are."""
        return math.ceil(self.max_num_encoder_tokens / self.block_size)


class SlidingWindowSpec(_PositionsSpec, frozen=True, kw_only=True, tag=True):
    """Keys and values of the last `sliding_window` positions (the current one included)."""

    sliding_window: int

    def max_blocks_per_request(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Blocks that one request can hold at once, at most."""
        positions = min(self.sliding_window - 1 + max_num_batched_tokens, max_model_len)
        # One more, since the window need not begin at a block's border.
        blocks = math.ceil(positions / self.block_size) + 1
        return min(blocks, self.table_width(max_model_len))


class RecurrentStateSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One page for a whole request, which every step changes: a state of `state_bytes`, and padding behind it.

    Nothing of it can be shared with another request, or looked up again for a prefix.
    """

    state_bytes: int
    padding_bytes: int = 0

    @property
    def block_size(self) -> int:
        """Positions that one block stands for: all."""
        return WHOLE_REQUEST

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.state_bytes + self.padding_bytes

    def with_pages_of(self, page_size_bytes: int) -> Self | None:
        """The same in pages of this size, which are padded; None where the state is larger."""
        padding = page_size_bytes - self.state_bytes
        return None if padding < 0 else msgspec.structs.replace(self, padding_bytes=padding)

    def table_width(self, max_model_len: int) -> int:
        """Blocks in a row of a block table."""
        return 1

    def max_blocks_per_request(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Blocks that one request can hold at once, at most."""
        return 1


AttentionSpec: TypeAlias = FullAttentionSpec | SlidingWindowSpec
KVCacheSpec: TypeAlias = AttentionSpec | MLAAttentionSpec | CrossAttentionSpec | RecurrentStateSpec


class KVCacheGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec


class KVCacheTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation; layers of different groups share it, since no block id is in two groups at once."""

    size_bytes: int
    shared_by: tuple[str, ...]


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole KV cache: `num_blocks` ids (id 0 is the null block, never given to a request)."""

    num_blocks: int
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroupSpec, ...]

    def of_layers(self, names: Container[str]) -> KVCacheConfig:
        """What a worker with these layers alone has of it: all groups, each with those of its layers."""

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
