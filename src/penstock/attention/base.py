"""What a backend of layers that keep pages provides, one for attention above all, and what it is told about a step.

Suffixes: T tokens of the step, R requests of the step, H query heads, K KV heads, D head size, B blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from penstock.contract import AttentionSpec
from penstock.device.base import TORCH_DTYPES
from penstock.kernels.rotary import Rotation, apply_rotary
from penstock.parallel.context_share import ContextShare

# What a backend computes once per step and KV-cache group, for its layers. Each backend has its own type.
AttentionMetadata = Any


class CacheLayer(Protocol):
    """A layer that keeps pages, as it describes itself: `LayerAttention`, or whatever else `BringsBackend`."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one attention layer computes, whatever backend runs it.

    scale: factor on the scores, usually head_size ** -0.5.
    sliding_window: number of last positions seen, the current one included; None sees all.
    soft_cap: scaled scores become soft_cap * tanh(score / soft_cap) before they are masked; None leaves them.
    context: where several ranks keep the positions of its KV heads by turns; None keeps all of them here.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    context: ContextShare | None = None


@dataclass(frozen=True, slots=True)
class SequenceGeometry:
    """A step's sequences, whether layers keep anything of them or not.

    Requests are ordered by their number of tokens, so decodes come first. `…_np` arrays are exact host copies where
    nothing runs ahead.

    query_start_loc: int32 [R + 1], first token of each request. query_start_loc_np: the same on the host.
    seq_lens: int32 [R], positions that each request has after this step.
    num_actual_tokens: tokens that are no padding.
    num_actual_reqs: requests that are no padding.
    """

    query_start_loc: Tensor
    query_start_loc_np: np.ndarray
    seq_lens: Tensor
    num_actual_tokens: int
    num_actual_reqs: int
    max_query_len: int

    def of_last_tokens(self, rows_R: Tensor) -> Self:
        """The last token of every request, at these rows."""
        return replace(self, **self._one_token_each(rows_R))

    def _one_token_each(self, rows_R: Tensor) -> dict[str, Any]:
        num_reqs = self.num_actual_reqs
        return {
            "query_start_loc": torch.arange(num_reqs + 1, dtype=torch.int32, device=rows_R.device),
            "query_start_loc_np": np.arange(num_reqs + 1),
            "num_actual_tokens": num_reqs,
            "max_query_len": 1,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGeometry(SequenceGeometry):
    """Sequences and their places in the pages of one KV-cache group.

    max_seq_len_upper_bound: known for certain while the device may be a step behind.
    block_table: int32 [R, B], block ids of each request.
    slot_mapping: int64 [T], flat KV position (block * block_size + offset) of each token, -1 for padding.
    is_written: the keys and values of these tokens are in the cache already.
    """

    max_seq_len_upper_bound: int
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    is_written: bool = False

    def of_last_tokens(self, rows_R: Tensor) -> Self:
        """The last token of every request, at these rows, when all keys and values have been written."""
        slot_mapping = self.slot_mapping.index_select(0, rows_R)
        return replace(self, **self._one_token_each(rows_R), slot_mapping=slot_mapping, is_written=True)


class CacheBackend(ABC):
    """What the layers of one KV-cache group need of a step, and what they see in their pages.

    A layer finds its own pages and the step's metadata with `ForwardContext.cache_of`.
    """

    name: ClassVar[str]
    # Whether the metadata made of a geometry stays good when its tensors, the same ones, hold the next step's values.
    keeps_metadata: ClassVar[bool] = False

    @abstractmethod
    def view_pages(self, pages_NX: Tensor, spec: Any) -> Tensor:
        """One layer's cache as its group's kind sees it, in uint8 pages of the spec: [num_blocks, page_size_bytes].

        Block b is the b-th page, whole: others clear, copy and send pages without knowing what is in them.
        """

    def place(self, geometry: StepGeometry) -> StepGeometry:
        """The lengths and slots of the group's requests: those of their sequences, unless a group has its own.

        Then its metadata is made of other tensors than the step's, and is made anew in each step (`keeps_metadata`).
        """
        return geometry

    @abstractmethod
    def make_metadata(self, geometry: StepGeometry) -> AttentionMetadata:
        """What the group's layers need of this step, computed once for all of them."""


@runtime_checkable
class BringsBackend(CacheLayer, Protocol):
    """A layer that is no attention, and says itself what runs it."""

    def make_backend(self, device: torch.device) -> CacheBackend:
        """For all layers of its group."""


class HeadNorm(Protocol):
    """Normalises query and key heads, [T, H + K, D], before they are turned."""

    @property
    def rms_of_each_head(self) -> tuple[Tensor, float] | None:
        """The weight [H + K, D] and the epsilon, if this is `rms_norm` of every head by itself."""

    def __call__(self, query_key_THD: Tensor, /) -> Tensor: ...


def keys_then_values(pages_NX: Tensor, dtype: str, *sizes: int) -> Tensor:
    """Pages that each hold keys of these sizes and then as many values: [2, num_blocks, *sizes]."""
    return pages_NX.view(TORCH_DTYPES[dtype]).view(-1, 2, *sizes).transpose(0, 1)


class AttentionBackend(CacheBackend):
    """One way to compute attention over a paged KV cache.

    An instance belongs to one KV-cache group of one runner and may keep buffers of its own. It is made with one of
    the group's layers, which are alike in what they store and in how far they see; the rest of what a layer computes
    (`scale`, `soft_cap`, query heads) is read from the layer that `forward` is given.
    """

    # Whether it can do with a part of the positions, where other ranks have the others (`LayerAttention.context`).
    shares_positions: ClassVar[bool] = False

    def __init__(self, layer: LayerAttention) -> None:
        self.sliding_window = layer.sliding_window
        self.num_kv_heads = layer.num_kv_heads

    @classmethod
    @abstractmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        """Why this backend cannot run the layer here, or None if it can."""

    @abstractmethod
    def view_pages(self, pages_NX: Tensor, spec: AttentionSpec) -> Tensor:
        """[2, num_blocks, ...] of the spec's dtype; keys and values are [0] and [1]. The rest is up to the backend."""

    @abstractmethod
    def forward(
        self,
        layer: LayerAttention,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Write the step's keys and values into the cache, then attend causally over each request's positions.

        Requests may share blocks, also such as another one fills in this step, if that has more than one token in it.
        Where the geometry says that keys and values are written, those given are not read.
        Returns [T, H, D] in the query's dtype; rows of padding hold anything finite.
        """

    @abstractmethod
    def write(
        self,
        layer: LayerAttention,
        key_TKD: Tensor,
        value_TKD: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """The first half of `forward`."""

    def forward_last(
        self,
        layer: LayerAttention,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        rows_R: Tensor,
        last_metadata: AttentionMetadata,
    ) -> Tensor:
        """Write the keys and values of all tokens, then attend with the last token of each request alone: [R, H, D].

        rows_R: int64, theirs. last_metadata: of `StepGeometry.of_last_tokens`.
        """
        self.write(layer, key_TKD, value_TKD, kv_cache, metadata)
        query_RHD = query_THD.index_select(0, rows_R)
        return self.forward(layer, query_RHD, key_TKD, value_TKD, kv_cache, last_metadata)

    def forward_projected(
        self,
        layer: LayerAttention,
        qkv_TX: Tensor,
        norm: HeadNorm | None,
        rotation: Rotation,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """`forward` from what the projections give; its query and key heads are normalised and turned first.

        qkv_TX: [T, (H + 2 * K) * D], query heads, key heads, value heads; overwritten. Returns [T, H * D].
        A backend whose kernel does all of it at once has a method of its own.
        """
        heads = _prepared_heads(layer, qkv_TX, norm, rotation)
        return self.forward(layer, *heads, kv_cache, metadata).flatten(1)

    def forward_last_projected(
        self,
        layer: LayerAttention,
        qkv_TX: Tensor,
        norm: HeadNorm | None,
        rotation: Rotation,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        rows_R: Tensor,
        last_metadata: AttentionMetadata,
    ) -> Tensor:
        """`forward_last` from what the projections give, as in `forward_projected`: [R, H * D]."""
        heads = _prepared_heads(layer, qkv_TX, norm, rotation)
        return self.forward_last(layer, *heads, kv_cache, metadata, rows_R, last_metadata).flatten(1)


def _prepared_heads(
    layer: LayerAttention, qkv_TX: Tensor, norm: HeadNorm | None, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value heads, the first two normalised and turned; in the memory of qkv_TX where that can be."""
    num_query_key_heads = layer.num_heads + layer.num_kv_heads
    heads_THD = qkv_TX.view(qkv_TX.shape[0], -1, layer.head_size)
    query_key_THD = heads_THD[:, :num_query_key_heads]
    if norm is not None:
        query_key_THD = norm(query_key_THD)
    apply_rotary(query_key_THD, rotation)
    query_THD, key_TKD = query_key_THD.split_with_sizes([layer.num_heads, layer.num_kv_heads], 1)
    return query_THD, key_TKD, heads_THD[:, num_query_key_heads:]
