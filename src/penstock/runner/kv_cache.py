"""Paged KV cache: its memory, and each layer's view of its pages.

Blocks are cleared, copied and sent as bytes of pages; only the attention backends know the layout inside a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.attention import (
    AttentionMetadata,
    CacheBackend,
    CacheLayer,
    ForwardContext,
    LastTokens,
    LayerAttention,
    SequenceGeometry,
    StepGeometry,
)
from penstock.attention.context import BoundLayer
from penstock.attention.select import select_cache_backend
from penstock.attention.whole_texts import WholeTextsBackend
from penstock.contract import KVCacheConfig
from penstock.device import Device
from penstock.step.batch import InputBatch


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """A KV-cache group with its backend; `refusals`: reasons why backends of higher priority cannot run it."""

    backend: CacheBackend
    refusals: Mapping[str, str]


class PagedKVCache:
    """Allocates the planned KV cache and binds every layer to its backend and its pages.

    layers: bound layers by name.
    """

    def __init__(
        self,
        device: Device,
        layers: Mapping[str, CacheLayer],
        config: KVCacheConfig,
        requested_backend: str | None,
    ) -> None:
        self.config = config
        self.groups: list[AttentionGroup] = []
        self.layers: dict[str, BoundLayer] = {}
        # By pool, uint8 [num_blocks, page_size_bytes] of each allocation.
        self._pages: list[list[Tensor]] = []
        pages_of: dict[str, Tensor] = {}
        for pool in config.pools:
            of_pool = [device.allocate(tensor.size_bytes).view(pool.num_blocks, -1) for tensor in pool.tensors]
            self._pages.append(of_pool)
            for tensor, pages in zip(pool.tensors, of_pool, strict=True):
                pages_of |= dict.fromkeys(tensor.shared_by, pages)
        self._pages_of_group: list[list[Tensor]] = []
        # A pipeline stage may have no layer of a group, but keeps the group's block tables all the same.
        fullest = max(config.groups, key=lambda group: len(group.layer_names), default=None)
        for index, group in enumerate(config.groups):
            chosen_by = group if group.layer_names or fullest is None else fullest
            backend, refusals = select_cache_backend(
                [layers[name] for name in chosen_by.layer_names],
                chosen_by.spec,
                device=torch.device(device.kind),
                candidates=device.attention_backends,
                requested=requested_backend,
            )
            self.groups.append(AttentionGroup(backend, refusals))
            self._pages_of_group.append([pages_of[name] for name in group.layer_names])
            for name in group.layer_names:
                self.layers[name] = BoundLayer(index, backend, backend.view_pages(pages_of[name], group.spec))
        # Attention without a KV cache is a group of its own, behind those of the cache.
        texts = [layer for layer in layers.values() if isinstance(layer, LayerAttention) and not layer.is_causal]
        self._texts = WholeTextsBackend() if texts else None
        for layer in texts:
            self.layers[layer.name] = BoundLayer(len(config.groups), self._texts, torch.empty(0))

        # Whether a batch's forward context stays valid while its tensors take the next step's values.
        self.keeps_metadata = all(group.backend.keeps_metadata for group in self.groups)
        # Whether decode steps can be captured in a graph.
        self.is_capturable = all(group.backend.is_capturable for group in self.groups)

    def make_context(self, batch: InputBatch) -> ForwardContext:
        """Build the forward context of a step."""
        return self.context(batch.sequences, batch.geometry)

    def context(self, sequences: SequenceGeometry, geometry: Sequence[StepGeometry]) -> ForwardContext:
        """Build the forward context of a step from its sequences and its geometry by group."""
        return ForwardContext(self.layers, self._metadata(sequences, geometry), sequences=sequences)

    def context_of_texts(self, sequences: SequenceGeometry) -> ForwardContext:
        """Build the forward context of whole texts, which no layer with a cache reads."""
        texts = WholeTextsBackend() if self._texts is None else self._texts
        metadata = [*[None] * len(self.groups), texts.make_metadata(sequences)]
        return ForwardContext(self.layers, metadata, sequences=sequences)

    def narrow_to_last_tokens(self, context: ForwardContext, batch: InputBatch) -> ForwardContext:
        """Narrow the batch's context to the hidden states of the requests' last tokens."""
        rows = batch.layout.logits_indices
        geometry = [of_group.of_last_tokens(rows) for of_group in batch.geometry]
        sequences = geometry[0] if geometry else batch.sequences.of_last_tokens(rows)
        return self.narrow(context, sequences, geometry, rows, batch.logits_rows.positions)

    def narrow(
        self,
        context: ForwardContext,
        sequences: SequenceGeometry,
        geometry: Sequence[StepGeometry],
        rows: Tensor,
        positions: Tensor,
    ) -> ForwardContext:
        """Narrow a context to one token of each request, at these rows and positions (int64).

        sequences, geometry: those of these tokens alone (`SequenceGeometry.of_last_tokens`).
        """
        starts, seq_lens = sequences.query_start_loc, sequences.seq_lens
        metadata = self._metadata(sequences, geometry)
        return replace(context, last=LastTokens(rows, positions, starts, seq_lens, metadata))

    def _metadata(self, sequences: SequenceGeometry, geometry: Sequence[StepGeometry]) -> list[AttentionMetadata]:
        pairs = zip((group.backend for group in self.groups), geometry, strict=True)
        metadata = [backend.make_metadata(backend.place(of_group)) for backend, of_group in pairs]
        return metadata if self._texts is None else [*metadata, self._texts.make_metadata(sequences)]

    def layer_memory(self, name: str) -> Tensor:
        """KV cache of one layer, in its backend's layout."""
        return self.layers[name].kv_cache

    def clear_blocks(self, group: int, block_ids: Tensor) -> None:
        """Fill blocks (int64 ids) of all layers of a group with zeros."""
        for pages_NX in self._pages_of_group[group]:
            pages_NX.index_fill_(0, block_ids, 0)

    def pages_of_block(self, group: int, block_id: int) -> list[Tensor]:
        """Pages of a group's block, of all its layers on this rank: uint8 [page_size_bytes] each."""
        return [pages_NX[block_id] for pages_NX in self._pages_of_group[group]]

    def pages_of_layers(self) -> dict[str, Tensor]:
        """Pages of each layer with blocks on this rank, by its name: uint8 [num_blocks, page_size_bytes]."""
        return {
            name: pages
            for group, of_group in zip(self.config.groups, self._pages_of_group, strict=True)
            for name, pages in zip(group.layer_names, of_group, strict=True)
        }

    def memory_of_blocks(self, pool: int, start: int, stop: int) -> Iterator[Tensor]:
        """Pages start .. stop of every allocation of a pool, contiguous: uint8 [stop - start, page_size_bytes]."""
        for pages_NX in self._pages[pool]:
            yield pages_NX[start:stop]

    @property
    def memory(self) -> list[Tensor]:
        """All of the memory, by allocation."""
        return [pages_NX for of_pool in self._pages for pages_NX in of_pool]

    def touch(self) -> None:
        """Write to all of the memory, so that a system with on-demand paging counts it as used."""
        for pages_NX in self.memory:
            pages_NX.zero_()
