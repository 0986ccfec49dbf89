"""Base of backends with a head-major cache, [2, num_blocks, K, positions, D]: a block of one head is a matrix.

In memory a block's values follow its keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.attention.base import AttentionBackend
from penstock.attention.step import AttentionStep, LayerAttention


class HeadMajorBackend(AttentionBackend):
    """Writes keys and values, and keeps a workspace for gathered blocks; subclasses compute attention."""

    def __init__(self, layer: LayerAttention) -> None:
        super().__init__(layer)
        self._workspace: tuple[Tensor, Tensor] | None = None

    @classmethod
    def why_not(cls, layer: LayerAttention, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        if not dtype.is_floating_point or dtype.itemsize == 1:
            return f"it does not support a {dtype} KV cache"
        return None if device.type == "cpu" else "it runs on the CPU only"

    def write_rows(self, step: AttentionStep, key_TKD: Tensor, value_TKD: Tensor) -> None:
        """Write these keys and values to the rows of the metadata, `kv_rows`, of `write_kv_rows`."""
        kv_cache, head_size = step.kv_cache, step.layer.head_size
        # A block is the keys of all heads, then the values.
        rows_XD = kv_cache.transpose(0, 1).view(-1, head_size)
        for row_ids, new_TKD in zip(step.metadata.kv_rows.to(kv_cache.device), (key_TKD, value_TKD), strict=True):
            rows_XD.index_copy_(0, row_ids, new_TKD.reshape(-1, head_size).to(kv_cache.dtype))

    def workspace_for(self, cache_BKPD: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Return two tensors like the cache, of at least `num_blocks` blocks; shared by all layers of the group."""
        if self._workspace is None or self._workspace[0].shape[0] < num_blocks:
            shape = (num_blocks + num_blocks // 4, *cache_BKPD.shape[1:])
            self._workspace = (cache_BKPD.new_empty(shape), cache_BKPD.new_empty(shape))
        return self._workspace


def gather_blocks(cache_BKPD: Tensor, block_ids: Tensor) -> Tensor:
    """Gather all positions of these blocks: [L, K, D]."""
    return cache_BKPD.index_select(0, block_ids).transpose(1, 2).flatten(0, 1)
