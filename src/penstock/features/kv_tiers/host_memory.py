"""Memory of one rank for blocks that leave its KV cache: pinned on a GPU's host, and a term of the memory plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.device import Device
from penstock.device.limits import memory_limit
from penstock.errors import ConfigError, OutOfMemory
from penstock.features.kv_tiers.moves import HostLayout
from penstock.models.interface import LanguageModel
from penstock.observability.units import format_bytes
from penstock.runner.kv_cache import PagedKVCache


def host_bytes(config: EngineConfig, _: LanguageModel, kind: str, __: torch.dtype) -> int:
    """Bytes of one rank in the memory of its device; a GPU's blocks are in other memory.

    Raises OutOfMemory where the host has less memory.
    """
    tiers, parallel = config.kv_tiers, config.parallel
    num_ranks_here = parallel.place(0)[1]
    wanted, free = num_ranks_here * tiers.host_bytes // parallel.world_size, memory_limit().free_bytes
    # The rest of the plan does not bound a KV cache whose size is given.
    kv_cache = num_ranks_here * (config.cache.kv_cache_memory_bytes or 0) if kind == "cpu" else 0
    if wanted and wanted + kv_cache > free and not config.replaces_lost_core:
        beside = f" beside {format_bytes(kv_cache)} of kv_cache_memory_bytes" if kv_cache else ""
        raise OutOfMemory(
            f"kv_offloading_size={tiers.kv_offloading_size:g} asks for {format_bytes(wanted)} of host memory{beside}, "
            f"but only {format_bytes(free)} are free. Lower it, or free memory."
        )
    return tiers.host_bytes // parallel.world_size if kind == "cpu" else 0


class HostMemory:
    """Memory for pages of blocks, in pieces of the smallest page's size. num_bytes: at most.

    device: whose copies they are; memory is pinned for a GPU.

    Raises ConfigError where no block fits or there are none, OutOfMemory where there is no such memory.
    """

    def __init__(self, kv_cache: PagedKVCache, num_bytes: int, device: Device) -> None:
        if not kv_cache.groups:
            raise ConfigError("kv_offloading_size is not valid for a model without a KV cache. Leave it out.")
        pages = [kv_cache.pages_of_block(group, 0) for group in range(len(kv_cache.groups))]
        self._piece_bytes = min((page.nbytes for of_group in pages for page in of_group), default=1)
        num_pieces = num_bytes // self._piece_bytes
        counts = tuple(sum(-(-page.nbytes // self._piece_bytes) for page in of_group) for of_group in pages)
        if num_pieces < max(counts):
            raise ConfigError(
                f"kv_offloading_size holds {format_bytes(num_bytes)} on each rank, and a block of the KV cache takes "
                f"{format_bytes(max(counts) * self._piece_bytes)}. Raise it."
            )
        self.layout = HostLayout(num_pieces, counts)
        try:
            size = num_pieces * self._piece_bytes
            is_pinned = device.kind == "cuda"
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=True) if is_pinned else device.allocate(size)
        except RuntimeError as error:
            raise OutOfMemory(
                f"kv_offloading_size: {format_bytes(num_bytes)} of host memory cannot be had: {error}. Lower it."
            ) from error
        self._pieces = memory.view(num_pieces, self._piece_bytes)

    def parts(self, pages: Sequence[Tensor], pieces: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of a block's pages, each with its memory here, uint8 of equal size."""
        parts = (part for page in pages for part in page.split(self._piece_bytes))
        for part, piece in zip(parts, pieces, strict=False):  # other ranks may have more
            yield part, self._pieces[piece, : part.nbytes]

    def pages(self, pages: Sequence[Tensor], pieces: Sequence[int]) -> Iterator[Tensor]:
        """Pages of a block as they are here, uint8, of the sizes of these pages."""
        first = 0
        for page in pages:
            parts = [content for _, content in self.parts([page], pieces[first:])]
            first += len(parts)
            yield parts[0] if len(parts) == 1 else torch.cat(parts)
