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

from penstock.attention.step import AttentionMetadata, AttentionStep, LayerAttention, Projection, SourceLengths
from penstock.contract import AttentionSpec
from penstock.device.base import TORCH_DTYPES


class CacheLayer(Protocol):
    """A layer with pages in the KV cache: `LayerAttention`, or a layer that `BringsBackend`."""

    @property
    def name(self) -> str: ...


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
    block_table: int32 [R, B], block ids of each request. num_own_blocks: its columns before those of positions.
    slot_mapping: int64 [T], flat KV position (block * block_size + offset) of each token, -1 for padding.
    slots: int64 [R], slot of each request; None for tokens that belong to no slot, as in a profile.
    """

    max_seq_len_upper_bound: int
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    num_own_blocks: int = 0
    slots: Tensor | None = None

    def of_last_tokens(self, rows_R: Tensor) -> Self:
        """Narrow to the last token of every request, at these rows, after all keys and values were written."""
        slot_mapping = self.slot_mapping.index_select(0, rows_R)
        return replace(self, **self._one_token_each(rows_R), slot_mapping=slot_mapping)


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
    # Whether a page of keys and values is its heads, one after another, so that pages of tensor-parallel ranks are
    # parts of the page of all heads.
    pages_are_heads: ClassVar[bool] = False

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


def keys_then_values(pages_NX: Tensor, dtype: str, *sizes: int) -> Tensor:
    """View pages of keys of these sizes followed by as many values: [2, num_blocks, *sizes]."""
    return pages_NX.view(TORCH_DTYPES[dtype]).view(-1, 2, *sizes).transpose(0, 1)


class AttentionBackend(CacheBackend):
    """Attention over a paged KV cache.

    An instance belongs to one KV-cache group of one runner and may keep buffers of its own. It is made with one of the
    group's layers, which are alike in their cache and their window; other parameters (`scale`, `soft_cap`, query heads)
    are read from the step's layer.
    """

    # Whether it supports decode context parallelism: positions sharded over ranks (`LayerAttention.context`).
    shares_positions: ClassVar[bool] = False
    # Whether it supports latent attention (`LayerAttention.latent_size`).
    attends_latents: ClassVar[bool] = False
    # Whether it supports ALiBi and other biases by distance (`LayerAttention.alibi_slopes`, `distance_biases`).
    biases_distances: ClassVar[bool] = False
    # Whether tokens may see later ones (`AttentionStep.visible_ends`).
    sees_later_tokens: ClassVar[bool] = False

    def __init__(self, layer: LayerAttention) -> None:
        self.window = layer.window
        self.num_kv_heads = layer.num_kv_heads
        self._sources = layer.sources

    def place(self, geometry: StepGeometry) -> StepGeometry:
        return geometry if self._sources is None else of_sources(geometry, self._sources)

    @classmethod
    @abstractmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        """Reason why this backend cannot run the layer here, or None if it can."""

    @abstractmethod
    def view_pages(self, pages_NX: Tensor, spec: AttentionSpec) -> Tensor:
        """View pages as [2, num_blocks, ...] of the spec's dtype: keys are [0], values [1]; [1, ...] of latents."""

    def run(self, step: AttentionStep) -> Tensor:
        """Write the step's keys and values to the cache, then attend causally to each request's positions.

        Requests may share blocks, including blocks that a request with several tokens fills in this step. Returns [T,
        H, D] from heads and [T, H * D] from a projection, which it may overwrite, in the queries' dtype, where D is the
        values' size; R rows where the step is narrowed to last tokens. Padding rows hold any finite value.
        A backend with a fused kernel overrides this.
        """
        heads = step.heads()
        self.write(step, heads.key_TKD, heads.value_TKD)
        output_THD = self.attend(*step.narrow(heads.query_THD))
        return output_THD.flatten(1) if isinstance(step.rows, Projection) else output_THD

    def read(self, step: AttentionStep, query_TX: Tensor) -> Tensor:
        """Attend to what the cache holds already, as cross attention does: [T, H * D] from projected queries.

        All tokens attend, also where the step is narrowed.
        """
        return self.attend(step, query_TX.view(query_TX.shape[0], -1, step.layer.head_size)).flatten(1)

    def recorded_read(self, step: AttentionStep, query_TX: Tensor) -> Tensor | None:
        """Record `read` in a program; None where the library has no operation for it."""
        return None

    @abstractmethod
    def write(self, step: AttentionStep, key_TKD: Tensor, value_TKD: Tensor) -> None:
        """Write the keys and values of all tokens to the cache: the first half of `run`."""

    @abstractmethod
    def attend(self, step: AttentionStep, query_THD: Tensor) -> Tensor:
        """Attend with the queries of the step's tokens, whose keys and values are in the cache: [T, H, D]."""


def of_sources(geometry: StepGeometry, sources: SourceLengths) -> StepGeometry:
    """Geometry of cross attention: each token is a request of its own, at the last position of its request's source.

    So attention that is causal sees the whole source.
    """
    seq_lens = sources.of_slots(geometry.seq_lens, geometry.slots)
    changed: dict[str, Any] = {"max_seq_len_upper_bound": sources.longest, "num_own_blocks": 0}
    if geometry.max_query_len <= 1:
        return replace(geometry, seq_lens=seq_lens, **changed)
    num_tokens = geometry.slot_mapping.shape[0]
    counts_R = geometry.query_start_loc.diff()
    rows = torch.arange(len(counts_R), device=counts_R.device)
    # Padding tokens belong to the last row.
    rows_T = torch.repeat_interleave(rows, counts_R, output_size=num_tokens)
    return replace(
        geometry,
        query_start_loc=torch.arange(num_tokens + 1, dtype=torch.int32, device=counts_R.device),
        query_start_loc_np=np.arange(num_tokens + 1),
        seq_lens=seq_lens.index_select(0, rows_T),
        num_actual_reqs=geometry.num_actual_tokens,
        max_query_len=1,
        block_table=geometry.block_table.index_select(0, rows_T),
        slots=None,
        **changed,
    )
