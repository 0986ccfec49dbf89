"""Keeping one request's NaN out of the requests that get its KV blocks afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.contract import SchedulerOutput
from penstock.device import Device
from penstock.runner.kv_cache import PagedKVCache


class PoisonedBlocks:
    """Once a request's logits were not finite, its blocks may hold NaN, and what frees them does not clear them.

    Attention multiplies by zero what is masked, and zero times NaN is NaN: a new owner that has filled only a part of
    such a block would be hurt. So from the first such failure on, blocks are cleared when a request gets them, as the
    step's message says to all ranks: results are read by one. Until then this costs nothing.
    """

    def __init__(self, device: Device, kv_cache: PagedKVCache) -> None:
        self._device = device
        self._kv_cache = kv_cache
        self._block_sizes = [group.spec.block_size for group in kv_cache.config.groups]

    def clear(self, output: SchedulerOutput) -> None:
        """Clear the blocks that requests get in this step, but for cached prefixes, whose content is known good."""
        if not output.clears_blocks:
            return
        for request in output.scheduled_new_reqs:
            for group, block_ids in enumerate(request.block_ids):
                num_shared = request.num_computed_tokens // self._block_sizes[group]
                self._clear(group, block_ids[num_shared:])
        for new_block_ids in output.scheduled_cached_reqs.new_block_ids:
            for group, block_ids in enumerate(new_block_ids or ()):
                self._clear(group, block_ids)

    def _clear(self, group: int, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._kv_cache.clear_blocks(group, self._device.upload(np.array(block_ids, dtype=np.int64)))
