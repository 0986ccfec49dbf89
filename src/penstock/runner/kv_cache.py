"""The KV cache's memory, and each layer's view of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.attention import (
    AttentionBackend,
    AttentionMetadata,
    ForwardContext,
    LastTokens,
    LayerAttention,
    StepGeometry,
)
from penstock.attention.context import BoundLayer
from penstock.attention.select import select_backend
from penstock.contract import KVCacheConfig
from penstock.device import Device
from penstock.device.base import TORCH_DTYPES
from penstock.models.program import ModelPrograms
from penstock.runner.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """One KV-cache group with the backend that runs its layers; `refusals` says why better backends do not."""

    backend: AttentionBackend
    refusals: Mapping[str, str]


class PagedKVCache:
    """Allocates the cache as planned and binds every layer to its backend and its part of the memory."""

    def __init__(
        self,
        device: Device,
        layers: Mapping[str, LayerAttention],
        config: KVCacheConfig,
        requested_backend: str | None,
    ) -> None:
        self.config = config
        self.groups: list[AttentionGroup] = []
        self._layers: dict[str, BoundLayer] = {}
        self.programs = ModelPrograms(self._layers)
        memory = {
            name: device.allocate(tensor.size_bytes) for tensor in config.tensors for name in tensor.shared_by[:1]
        }
        owner = {name: memory[tensor.shared_by[0]] for tensor in config.tensors for name in tensor.shared_by}
        for index, group in enumerate(config.groups):
            spec = group.spec
            dtype = TORCH_DTYPES[spec.dtype]
            backend_class, refusals = select_backend(
                *(layers[name] for name in group.layer_names),
                dtype=dtype,
                device=torch.device(device.kind),
                block_size=spec.block_size,
                candidates=device.attention_backends,
                requested=requested_backend,
            )
            backend = backend_class(layers[group.layer_names[0]])
            self.groups.append(AttentionGroup(backend, refusals))
            sizes = config.num_blocks, spec.block_size, spec.num_kv_heads, spec.elements_per_head
            for name in group.layer_names:
                self._layers[name] = BoundLayer(index, backend, backend.view_cache(owner[name].view(dtype), *sizes))

        # Whether a batch's context stays good while its tensors take the next step's values.
        self.keeps_metadata = all(group.backend.keeps_metadata for group in self.groups)

    def make_context(self, batch: InputBatch) -> ForwardContext:
        """What the model's layers need to attend in this step."""
        return self.context(batch.geometry)

    def context(self, geometry: Sequence[StepGeometry]) -> ForwardContext:
        """The same from where the step's tokens lie, by group."""
        return ForwardContext(self._layers, self._metadata(geometry))

    def narrow_to_last_tokens(self, context: ForwardContext, batch: InputBatch) -> ForwardContext:
        """The context of the batch where no other hidden states than those of the requests' last tokens are needed."""
        rows = batch.layout.logits_indices
        geometry = [of_group.of_last_tokens(rows) for of_group in batch.geometry]
        metadata = self._metadata(geometry)
        last = LastTokens(rows, batch.logits_rows.positions, geometry[0].query_start_loc, metadata)
        return replace(context, last=last)

    def _metadata(self, geometry: Sequence[StepGeometry]) -> list[AttentionMetadata]:
        return [group.backend.make_metadata(of_group) for group, of_group in zip(self.groups, geometry, strict=True)]

    def layer_memory(self, name: str) -> Tensor:
        """One layer's cache, in its backend's layout."""
        return self._layers[name].kv_cache

    def clear_blocks(self, group: int, block_ids: Tensor) -> None:
        """Fill these blocks (int64) of all of a group's layers with zeros."""
        for bound in self._layers.values():
            if bound.group == group:
                bound.kv_cache.index_fill_(1, block_ids, 0)

    @property
    def largest_part_bytes(self) -> int:
        """Of what `memory_of_blocks` gives for one block."""
        return max(part.nbytes for part in self.memory_of_blocks(0, 1))

    def memory_of_blocks(self, start: int, stop: int) -> Iterator[Tensor]:
        """The parts of memory that blocks start .. stop have, contiguous: of a layer its keys and values, or both."""
        for bound in self._layers.values():
            cache = bound.kv_cache
            for part in cache.unbind(0) if cache.is_contiguous() else [cache.permute(1, 2, 0, 3, 4)]:
                yield part[start:stop]

    def touch(self) -> None:
        """Write to all of it, so that a system that hands out pages on first use counts it as taken."""
        for bound in self._layers.values():
            bound.kv_cache.zero_()
