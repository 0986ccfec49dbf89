"""Memory for the KV cache's next blocks, before a step needs it.

A system hands out pages when they are first written to, and clears them then: in the middle of a prefill, that took up
to a tenth of its time. So a thread asks for pages while the worker is idle, and always for a part of the cache only, so
that a cache larger than what is used of it costs little.
"""

from __future__ import annotations

import threading
import weakref

from penstock.device import Device
from penstock.runner.block_tables import BlockTables
from penstock.runner.kv_cache import PagedKVCache

# Of the cache, how much is to be ready beyond the blocks that were used: one part in so many.
_SHARE = 8
# A worker is idle when it has been without a step for so long.
_IDLE_S = 0.05
# At once, and then it is looked whether a step has begun: a millisecond or two.
_PIECE_BYTES = 2 << 20


class PagePrefaulting:
    """Keeps pages ready for the blocks beyond the highest one that was used; blocks are used from the lowest on."""

    def __init__(self, device: Device, block_tables: BlockTables, kv_cache: PagedKVCache) -> None:
        self._device = device
        self._block_tables = block_tables
        self._kv_cache = kv_cache
        self._num_blocks = kv_cache.config.num_blocks
        self._num_ahead = -(-self._num_blocks // _SHARE)
        self._num_ready = 0
        # More than this block being used, there is work to do.
        self._wakes_at = self._num_blocks
        self._is_in_step = False
        self._num_steps = 0
        self._num_steps_before = -1
        self._is_wanted = wanted = threading.Event()
        self._is_closed = threading.Event()
        # The thread must not keep the cache alive when nobody else does.
        thread = threading.Thread(target=_work, args=(weakref.ref(self), wanted), name="penstock-pages", daemon=True)
        # Called at the end of the program, too: Python would end the thread within an operator of torch, whose C++
        # frames then end the process ("terminate called without an active exception").
        self._end_thread = weakref.finalize(self, _end, thread, self._is_closed, wanted)
        thread.start()
        wanted.set()

    @property
    def num_ready(self) -> int:
        """Blocks that have their pages, from the first one on."""
        return self._num_ready

    def begin_step(self) -> None:
        self._is_in_step = True

    def end_step(self) -> None:
        self._is_in_step = False
        self._num_steps += 1
        if self._block_tables.highest_block > self._wakes_at:
            self._is_wanted.set()

    def close(self) -> None:
        """The memory may go when this returns."""
        self._end_thread()

    def make_ready(self) -> bool:
        """Make pages ready as far ahead as is wanted, while nothing else is done. False when no more can be done."""
        num_blocks = min(self._block_tables.highest_block + 1 + self._num_ahead, self._num_blocks)
        at_once = max(1, _PIECE_BYTES // max(1, self._kv_cache.page_size_bytes))
        for start in range(self._num_ready, num_blocks, at_once):
            stop = min(start + at_once, num_blocks)
            for memory in self._kv_cache.memory_of_blocks(start, stop):
                if not self._wait_until_idle() or not self._device.make_pages_ready(memory):
                    return False
            self._num_ready = stop
        # At half of what is ready, so that there is time to be idle in.
        self._wakes_at = self._num_ready - 1 - self._num_ahead // 2
        return num_blocks < self._num_blocks and not self._is_closed.is_set()

    def _wait_until_idle(self) -> bool:
        """Returns at once while no step has ended since the last call; False when this is closed."""
        while not self._is_closed.is_set():
            if not self._is_in_step and self._num_steps == self._num_steps_before:
                return True
            self._num_steps_before = self._num_steps
            self._is_closed.wait(_IDLE_S)
        return False


def _work(pages: weakref.ref[PagePrefaulting], wanted: threading.Event) -> None:
    while True:
        wanted.wait()
        wanted.clear()
        now = pages()
        if now is None or not now.make_ready():
            return
        del now


def _end(thread: threading.Thread, is_closed: threading.Event, wanted: threading.Event) -> None:
    """End the thread, which a fork of the process does not have. The last reference may end in the thread itself."""
    if not thread.is_alive():
        return
    is_closed.set()
    wanted.set()
    if threading.current_thread() is not thread:
        thread.join()
