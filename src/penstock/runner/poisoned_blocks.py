"""Clearing of KV blocks that may hold NaN, before other requests get them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.contract import RecurrentStateSpec, SchedulerOutput
from penstock.device import Device
from penstock.runner.kv_cache import PagedKVCache


class PoisonedBlocks:
    """Zeroes newly allocated blocks once a request's logits were not finite.

    Its blocks may hold NaN, and freeing does not clear them. Attention multiplies masked positions by zero, and zero
    times NaN is NaN: a later request that has filled only a part of such a block would fail too. From the first such
    failure on the scheduler's message asks all ranks to clear (`clears_blocks`), since one rank reads the results.
    Before that it costs nothing.
    """

    def __init__(self, device: Device, kv_cache: PagedKVCache) -> None:
        self._device = device
        self._kv_cache = kv_cache
        # Recurrent states are written whole before they are read.
        self._block_sizes = {
            index: group.spec.block_size
            for index, group in enumerate(kv_cache.config.groups)
            if not isinstance(group.spec, RecurrentStateSpec)
        }

    def clear(self, output: SchedulerOutput) -> None:
        """Clear the blocks that requests get in this step, except cached prefixes, whose content is known good."""
        for request in output.scheduled_new_reqs:
            for group, block_size in self._block_sizes.items():
                self._clear(group, request.block_ids[group][request.num_computed_tokens // block_size :])
        for new_block_ids in output.scheduled_cached_reqs.new_block_ids:
            if new_block_ids is not None:
                for group in self._block_sizes:
                    self._clear(group, new_block_ids[group])

    def _clear(self, group: int, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._kv_cache.clear_blocks(group, self._device.upload(np.array(block_ids, dtype=np.int64)))
