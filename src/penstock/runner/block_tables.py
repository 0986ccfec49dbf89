"""Block tables of all slots, per KV-cache group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.contract import KVCacheConfig, NewRequestData
from penstock.device import Device
from penstock.runner.slot_owner import SlotOwner
from penstock.runner.staging import StagedTensor, flush_together


class BlockTables(SlotOwner):
    """Block tables, one per KV-cache group: int32 [slots, max blocks of a request]; block 0 is the null block.

    Entries beyond a request's blocks are stale and never read.
    highest_blocks: largest block id of each pool that any table has held. on_growth: called with a pool and its largest
    block id when that rises; None for none.
    """

    def __init__(self, device: Device, num_slots: int, max_model_len: int, kv_cache_config: KVCacheConfig) -> None:
        self.block_sizes = [group.spec.block_size for group in kv_cache_config.groups]
        # Columns before those of positions.
        self.num_own_blocks = [group.spec.num_own_blocks for group in kv_cache_config.groups]
        widths = [group.spec.table_width(max_model_len) for group in kv_cache_config.groups]
        self._tables = [StagedTensor(device, num_slots, width, torch.int32) for width in widths]
        # Of each slot, by group.
        self._num_blocks = [[0] * num_slots for _ in widths]
        self._pools = [group.pool for group in kv_cache_config.groups]
        self.highest_blocks = [0] * len(kv_cache_config.pools)
        self.on_growth: Callable[[int, int], None] | None = None

    def add(self, slot: int, request: NewRequestData) -> None:
        for num_blocks in self._num_blocks:
            num_blocks[slot] = 0
        self.extend(slot, request.block_ids)

    def extend(self, slot: int, block_ids: Sequence[list[int]]) -> None:
        groups = zip(self._tables, self._num_blocks, self._pools, block_ids, strict=True)
        for table, num_blocks, pool, ids in groups:
            table.stage(slot, num_blocks[slot], ids)
            num_blocks[slot] += len(ids)
            highest = max(ids, default=0)
            if highest > self.highest_blocks[pool]:
                self.highest_blocks[pool] = highest
                if self.on_growth is not None:
                    self.on_growth(pool, highest)

    def rollback(self, slot: int) -> None:
        for table in self._tables:
            table.discard(slot)

    def flush(self) -> None:
        flush_together(self._tables)

    def table(self, group: int) -> Tensor:
        return self._tables[group].tensor
