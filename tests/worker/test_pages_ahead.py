"""Pages for the KV cache's next blocks, made ready while the worker is idle."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from penstock.config import DeviceConfig
from penstock.device import Device, create_device
from penstock.runner.block_tables import BlockTables
from penstock.runner.kv_cache import PagedKVCache
from penstock.worker.pages_ahead import PagesAhead
from support.checkpoints import tiny_checkpoint
from support.engines import greedy, make_core, random_prompts, run
from support.runners import LAYER, kv_cache_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are made ready on Linux only")

NUM_BLOCKS = 1 << 19
PAGE = mmap.PAGESIZE


@pytest.fixture
def device() -> Device:
    return create_device(DeviceConfig(device="cpu", num_threads=1))


def new_cache(device: Device) -> tuple[BlockTables, PagedKVCache]:
    config = kv_cache_config(NUM_BLOCKS)
    return BlockTables(device, 2, 4 * NUM_BLOCKS, config), PagedKVCache(device, {LAYER.name: LAYER}, config, None)


def share_handed_out(memory: Tensor) -> float:
    """Of the pages that lie wholly in this memory, what share the system has handed out."""
    start = -(-memory.data_ptr() // PAGE) * PAGE
    count = (memory.data_ptr() + memory.nbytes - start) // PAGE
    found = np.zeros(count, dtype=np.uint8)
    done = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(start), ctypes.c_size_t(count * PAGE), ctypes.c_void_p(found.ctypes.data)
    )
    assert done == 0, ctypes.get_errno()
    return float((found & 1).mean())


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.005)


def test_pages_are_handed_out_and_values_stay(device: Device) -> None:
    memory = device.allocate((64 << 20) + 100)[50:]
    memory[7] = 42
    assert share_handed_out(memory) < 0.1
    assert device.make_pages_ready(memory)
    assert share_handed_out(memory) == 1
    assert memory[7] == 42
    assert int(memory.sum()) == 42


def test_memory_is_fresh_whatever_the_heap_has_kept(device: Device) -> None:
    with device.loading_weights():
        pass  # after which what is freed is kept
    # Together they lie at the end of the heap, which keeps them.
    pieces = [np.ones(24 << 20, dtype=np.uint8) for _ in range(6)]
    del pieces
    assert share_handed_out(device.allocate(64 << 20)) == 0


def test_an_eighth_of_the_cache_is_ready_beyond_what_is_used(device: Device) -> None:
    tables, cache = new_cache(device)
    pages = PagesAhead(device, tables, cache)
    try:
        wait_for(lambda: pages.num_ready == NUM_BLOCKS // 8 + 1)
        assert share_handed_out(next(cache.memory_of_blocks(0, NUM_BLOCKS // 8))) == 1
        # Where pages are large, the last one reaches beyond.
        assert share_handed_out(next(cache.memory_of_blocks(NUM_BLOCKS // 4, NUM_BLOCKS // 2))) < 0.1

        tables.append_blocks(0, ([100],))
        pages.begin_step()
        pages.end_step()
        assert not pages._is_wanted.is_set(), "what is ready is enough for a while"

        tables.append_blocks(0, ([NUM_BLOCKS // 8],))
        pages.begin_step()
        pages.end_step()
        wait_for(lambda: pages.num_ready == NUM_BLOCKS // 8 * 2 + 1)

        tables.append_blocks(0, ([NUM_BLOCKS - 1],))
        pages.end_step()
        wait_for(lambda: pages.num_ready == NUM_BLOCKS)
        wait_for(lambda: not pages._thread.is_alive())
    finally:
        pages.close()


def test_nothing_is_done_beside_a_step(device: Device) -> None:
    tables, cache = new_cache(device)
    tables.append_blocks(0, ([NUM_BLOCKS // 2],))
    pages = PagesAhead(device, tables, cache)
    pages.begin_step()
    try:
        time.sleep(0.3)
        reached = pages.num_ready
        time.sleep(0.3)
        assert pages.num_ready == reached < NUM_BLOCKS // 2
        pages.end_step()
        wait_for(lambda: pages.num_ready > NUM_BLOCKS // 2)
    finally:
        pages.close()


def test_a_system_without_it_is_asked_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []
    monkeypatch.setattr(device, "make_pages_ready", lambda memory: bool(asked.append(memory)))
    pages = PagesAhead(device, *new_cache(device))
    wait_for(lambda: not pages._thread.is_alive())
    assert len(asked) == 1
    pages.end_step()
    pages.close()


def test_the_thread_does_not_keep_the_cache(device: Device) -> None:
    tables, cache = new_cache(device)
    pages = PagesAhead(device, tables, cache)
    thread, gone = pages._thread, weakref.ref(cache)
    del pages, cache
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert gone() is None


def test_a_worker_ends_its_thread(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    core = make_core(tmp_path)
    run(core, random_prompts([20], 90), greedy(3))
    (name,) = core.collective_rpc(_thread_name)
    assert name in [thread.name for thread in threading.enumerate()]
    core.close()
    assert name not in [thread.name for thread in threading.enumerate()]


def _thread_name(worker: Any) -> str:
    assert isinstance(worker._pages, PagesAhead)
    worker._pages._thread.name += str(id(worker))
    return str(worker._pages._thread.name)
