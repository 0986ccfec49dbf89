"""Interfaces of attention backends and of backends of other layers with a KV cache, and the geometry of a step.

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
from penstock.kernels.paged_attention import NO_SCALES, AttentionSinks, CacheScales
from penstock.kernels.rotary import Rotation, apply_rotary
from penstock.parallel.context_share import ContextShare

# Computed by a backend once per step and KV-cache group, for the group's layers. Each backend has its own type.
AttentionMetadata = Any


class CacheLayer(Protocol):
    """A layer with pages in the KV cache: `LayerAttention`, or a layer that `BringsBackend`."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Parameters of one attention layer, independent of the backend.

    scale: factor on the scores, usually head_size ** -0.5.
    sliding_window: number of visible last positions, including the current one; None for no window.
    chunk_size: chunked local attention: positions of a chunk, outside of which nothing is visible; None for no chunks.
    soft_cap: scaled scores become soft_cap * tanh(score / soft_cap) before the mask; None for no cap.
    context: ranks that shard the positions of the layer's KV heads (decode context parallelism); None without.
    latent_size: latent attention: there is one KV head, and its value is the last so many elements of its key, so that
    the cache keeps keys alone; None for attention with values of their own.
    sinks: of the query heads; None for none. Its tensor is read in every step, since weights are loaded later.
    alibi_slopes: of the query heads: each position between query and key lowers the score by the slope (ALiBi, Press et
    al. 2022, https://arxiv.org/abs/2108.12409); None for none. Not together with a soft cap.
    cpu_arithmetic: "bfloat16" for products in bfloat16 arithmetic over a bfloat16 KV cache (`ModelConfig`).
    cache_scales: of an FP8 KV cache, from the checkpoint; None if it has none. They are constants of a recorded step.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    context: ContextShare | None = None
    latent_size: int | None = None
    sinks: AttentionSinks | None = None
    cpu_arithmetic: str = "float32"
    chunk_size: int | None = None
    cache_scales: CacheScales | None = None
    alibi_slopes: tuple[float, ...] | None = None

    def scales_in(self, kv_cache: Tensor) -> CacheScales:
        """Return the scales of this cache's keys and values: 1 without scales, and in other dtypes than FP8."""
        return self.cache_scales or NO_SCALES if kv_cache.dtype is torch.float8_e4m3fn else NO_SCALES

    @property
    def window(self) -> int | None:
        """The sliding window, or the size of chunks as a negative number, as kernels take it; None for neither."""
        return self.sliding_window if self.chunk_size is None else -self.chunk_size

    @property
    def value_size(self) -> int:
        """Elements of a head's value, and of its output."""
        return self.head_size if self.latent_size is None else self.latent_size

    @property
    def sink_values(self) -> Tensor | None:
        """The values of the sinks, [H]; None for none."""
        return None if self.sinks is None else self.sinks.sinks


@dataclass(frozen=True, slots=True)
class SequenceGeometry:
    """Sequences of a step, independent of any KV cache.

    Requests are ordered by their number of tokens, so decodes come first. `…_np` arrays are exact host copies.

    query_start_loc: int32 [R + 1], first token of each request. query_start_loc_np: the same on the host.
    seq_lens: int32 [R], length of each request after this step.
    num_actual_tokens: tokens without padding.
    num_actual_reqs: requests without padding.
    """

    query_start_loc: Tensor
    query_start_loc_np: np.ndarray
    seq_lens: Tensor
    num_actual_tokens: int
    num_actual_reqs: int
    max_query_len: int

    def of_last_tokens(self, rows_R: Tensor) -> Self:
        """Narrow to the last token of every request, at these rows."""
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
    """Sequences with their block table and slot mapping in one KV-cache group.

    max_seq_len_upper_bound: an upper bound on the host, while the device may be a step behind.
    block_table: int32 [R, B], block ids of each request.
    slot_mapping: int64 [T], flat KV position (block * block_size + offset) of each token, -1 for padding.
    is_written: keys and values of these tokens are in the cache already.
    """

    max_seq_len_upper_bound: int
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    is_written: bool = False

    def of_last_tokens(self, rows_R: Tensor) -> Self:
        """Narrow to the last token of every request, at these rows, after all keys and values were written."""
        slot_mapping = self.slot_mapping.index_select(0, rows_R)
        return replace(self, **self._one_token_each(rows_R), slot_mapping=slot_mapping, is_written=True)


class CacheBackend(ABC):
    """Computes step metadata for the layers of one KV-cache group, and defines the layout of their pages.

    A layer gets its own pages and the step's metadata from `ForwardContext.cache_of`.
    """

    name: ClassVar[str]
    # Whether metadata stays valid while the geometry's tensors, the same ones, take the next step's values.
    keeps_metadata: ClassVar[bool] = False
    # Whether a step in which all requests have equally many tokens depends on its tensors and on that number alone,
    # padding rows included, so that a graph captured in one step runs every step of the same padded sizes.
    is_capturable: ClassVar[bool] = False

    @abstractmethod
    def view_pages(self, pages_NX: Tensor, spec: Any) -> Tensor:
        """View uint8 pages, [num_blocks, page_size_bytes], as one layer's cache.

        Block b must be the b-th page, whole: pages are cleared, copied and sent without knowledge of their layout.
        """

    def place(self, geometry: StepGeometry) -> StepGeometry:
        """Return lengths and slots of the group's requests; a group may have its own instead of the sequences'.

        Its metadata is then made of other tensors than the step's, and anew in each step (`keeps_metadata`).
        """
        return geometry

    @abstractmethod
    def make_metadata(self, geometry: StepGeometry) -> AttentionMetadata:
        """Compute the step's metadata, once for all layers of the group."""


@runtime_checkable
class BringsBackend(CacheLayer, Protocol):
    """A layer other than attention, which brings its own backend."""

    def make_backend(self, device: torch.device) -> CacheBackend:
        """Make the backend of all layers of its group."""


class HeadNorm(Protocol):
    """Normalisation of query and key heads, [T, H + K, D], before rotary embedding, or after it."""

    @property
    def follows_rotation(self) -> bool:
        """Whether heads are rotated first."""

    @property
    def rms_of_each_head(self) -> tuple[Tensor, float] | None:
        """The weight [H + K, D] and the epsilon, if this is an RMSNorm of each head; else None.

        A weight of the heads' dtype stands for `rms_norm`, one in float32 for `rms_norm_rounded_last`.
        """

    def __call__(self, query_key_THD: Tensor, /) -> Tensor: ...


def keys_then_values(pages_NX: Tensor, dtype: str, *sizes: int) -> Tensor:
    """View pages of keys of these sizes followed by as many values: [2, num_blocks, *sizes]."""
    return pages_NX.view(TORCH_DTYPES[dtype]).view(-1, 2, *sizes).transpose(0, 1)


class AttentionBackend(CacheBackend):
    """Attention over a paged KV cache.

    An instance belongs to one KV-cache group of one runner and may keep buffers of its own. It is made with one of the
    group's layers, which are alike in their cache and their window; other parameters (`scale`, `soft_cap`, query heads)
    are read from the layer passed to `forward`.
    """

    # Whether it supports decode context parallelism: positions sharded over ranks (`LayerAttention.context`).
    shares_positions: ClassVar[bool] = False
    # Whether it supports latent attention (`LayerAttention.latent_size`).
    attends_latents: ClassVar[bool] = False
    # Whether it supports ALiBi (`LayerAttention.alibi_slopes`).
    biases_distances: ClassVar[bool] = False

    def __init__(self, layer: LayerAttention) -> None:
        self.window = layer.window
        self.num_kv_heads = layer.num_kv_heads

    @classmethod
    @abstractmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        """Reason why this backend cannot run the layer here, or None if it can."""

    @abstractmethod
    def view_pages(self, pages_NX: Tensor, spec: AttentionSpec) -> Tensor:
        """View pages as [2, num_blocks, ...] of the spec's dtype: keys are [0], values [1]; [1, ...] of latents."""

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
        """Write the step's keys and values to the cache, then attend causally to each request's positions.

        Requests may share blocks, including blocks that a request with several tokens fills in this step. Where the
        geometry has `is_written`, the given keys and values are not read. Returns [T, H, D] in the query's dtype,
        where D is the values' size; padding rows hold any finite value.
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
        """Write keys and values to the cache: the first half of `forward`."""

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
        """Write the keys and values of all tokens, then attend with the last token of each request only: [R, H, D].

        rows_R: int64, rows of the last tokens. last_metadata: metadata of `StepGeometry.of_last_tokens`.
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
        """Run `forward` on the output of the QKV projection, after normalisation and rotary embedding of its heads.

        qkv_TX: [T, (H + 2 * K) * D], query heads, key heads, value heads; overwritten. Of latent attention,
        [T, (H + 1) * D]. Returns [T, H * D].
        A backend with a fused kernel overrides this.
        """
        heads = prepared_heads(layer, qkv_TX, norm, rotation)
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
        """Run `forward_last` on the output of the QKV projection, as in `forward_projected`: [R, H * D]."""
        heads = prepared_heads(layer, qkv_TX, norm, rotation)
        return self.forward_last(layer, *heads, kv_cache, metadata, rows_R, last_metadata).flatten(1)


def prepared_heads(
    layer: LayerAttention, qkv_TX: Tensor, norm: HeadNorm | None, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split into query, key and value heads, with norm and rotary embedding applied, in place where possible."""
    num_query_key_heads = layer.num_heads + layer.num_kv_heads
    heads_THD = qkv_TX.view(qkv_TX.shape[0], -1, layer.head_size)
    query_key_THD = heads_THD[:, :num_query_key_heads]
    if norm is not None and not norm.follows_rotation:
        query_key_THD = norm(query_key_THD)
    if rotation is not None:
        apply_rotary(query_key_THD, rotation)
    if norm is not None and norm.follows_rotation:
        query_key_THD = norm(query_key_THD)
    query_THD, key_TKD = query_key_THD.split_with_sizes([layer.num_heads, layer.num_kv_heads], 1)
    if layer.latent_size is not None:
        return query_THD, key_TKD, key_TKD[..., layer.head_size - layer.latent_size :]
    return query_THD, key_TKD, heads_THD[:, num_query_key_heads:]
