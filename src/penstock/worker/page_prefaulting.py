"""Prefaulting of KV cache pages before a step needs them.

The system maps and clears pages at the first write, which took up to a tenth of a prefill's time. So a thread faults
pages in while the worker is idle, and only a part of the KV cache ahead of its use, so that unused memory stays free.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from penstock.device import Device
from penstock.runner.block_tables import BlockTables
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.step_order import StepOrder

# Prefaulted blocks beyond the used ones: one part in so many of each pool, and so many bytes at most.
_SHARE = 8
_MOST_BYTES = 256 << 20
# Time without a step after which the worker counts as idle.
_IDLE_S = 0.05
# Bytes between checks for a step, one or two milliseconds.
_PIECE_BYTES = 2 << 20


class _Pool:
    """Blocks of one pool. num_ready: prefaulted ones. wakes_at: highest used block beyond which more pages are.

    bytes_per_block: 0 on a pipeline stage without layers of the pool.
    """

    def __init__(self, num_blocks: int, bytes_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.num_ahead = min(-(-num_blocks // _SHARE), max(1, _MOST_BYTES // max(1, bytes_per_block)))
        self.num_ready = 0
        self.wakes_at = num_blocks


class PagePrefaulting:
    """Prefaults pages of the blocks beyond the highest used one; blocks are used from the lowest on.

    steps: of the runner, which say whether it is idle.
    """

    def __init__(
        self, device: Device, block_tables: BlockTables, kv_cache: PagedKVCache, steps: StepOrder[Any]
    ) -> None:
        self._device = device
        self._block_tables = block_tables
        self._kv_cache = kv_cache
        self._pools = [_Pool(pool.num_blocks, pool.size_bytes // pool.num_blocks) for pool in kv_cache.config.pools]
        self._steps = steps
        self._step_id_before: int | None = None
        self._is_wanted = wanted = threading.Event()
        self._is_closed = threading.Event()
        # A weak reference, so that the thread does not keep the KV cache alive.
        thread = threading.Thread(target=_work, args=(weakref.ref(self), wanted), name="penstock-pages", daemon=True)
        # Called at exit too: Python would end the thread within an operator of torch, whose C++ frames then abort the
        # process ("terminate called without an active exception").
        self._end_thread = weakref.finalize(self, _end, thread, self._is_closed, wanted)
        thread.start()
        block_tables.on_growth = partial(_note_growth, self._pools, wanted)
        wanted.set()

    @property
    def num_ready(self) -> list[int]:
        """Prefaulted blocks of each pool, from the first one on."""
        return [pool.num_ready for pool in self._pools]

    def close(self) -> None:
        """Stop the thread; the KV cache may be freed afterwards."""
        self._end_thread()

    def make_ready(self) -> bool:
        """Prefault pages while the worker is idle. False when the work is done for good, or closed."""
        for index, pool in enumerate(self._pools):
            end = min(self._block_tables.highest_blocks[index] + 1 + pool.num_ahead, pool.num_blocks)
            while pool.num_ready < end:
                start, stop = pool.num_ready, end
                for memory in self._kv_cache.memory_of_blocks(index, start, end):
                    stop = min(start + max(1, _PIECE_BYTES // memory.shape[1]), end)
                    if not self._wait_until_idle() or not self._device.make_pages_ready(memory[: stop - start]):
                        return False
                pool.num_ready = stop
            # At half of the prefaulted blocks, so that there is idle time left.
            pool.wakes_at = pool.num_ready - 1 - pool.num_ahead // 2
            _note_growth(self._pools, self._is_wanted, index, self._block_tables.highest_blocks[index])
        is_done = all(pool.num_ready == pool.num_blocks for pool in self._pools)
        return not is_done and not self._is_closed.is_set()

    def _wait_until_idle(self) -> bool:
        """Wait until no step has run for a while; False when closed."""
        while not self._is_closed.is_set():
            step_id = self._steps.last_step_id
            if not self._steps.is_in_step and step_id == self._step_id_before:
                return True
            self._step_id_before = step_id
            self._is_closed.wait(_IDLE_S)
        return False


def _note_growth(pools: Sequence[_Pool], wanted: threading.Event, index: int, highest: int) -> None:
    """Note the highest used block of a pool."""
    if highest > pools[index].wakes_at:
        wanted.set()


def _work(pages: weakref.ref[PagePrefaulting], wanted: threading.Event) -> None:
    while True:
        wanted.wait()
        wanted.clear()
        now = pages()
        if now is None or not now.make_ready():
            return
        del now


def _end(thread: threading.Thread, is_closed: threading.Event, wanted: threading.Event) -> None:
    """End the thread, which a forked process does not have; may run in the thread itself."""
    if not thread.is_alive():
        return
    is_closed.set()
    wanted.set()
    if threading.current_thread() is not thread:
        thread.join()
