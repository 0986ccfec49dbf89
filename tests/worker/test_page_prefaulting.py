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

import numpy as np
import pytest
from torch import Tensor

from penstock.config import DeviceConfig
from penstock.contract import SchedulerOutput
from penstock.device import Device, create_device
from penstock.runner.block_tables import BlockTables
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.step_order import StepOrder
from penstock.step.frame import Frame
from penstock.worker.page_prefaulting import PagePrefaulting, _Pool
from support.checkpoints import tiny_checkpoint
from support.engines import greedy, make_core, random_prompts, run
from support.runners import LAYER, ArithmeticModel, kv_cache_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are made ready on Linux only")

NUM_BLOCKS = 1 << 19
PAGE = mmap.PAGESIZE


@pytest.fixture
def device() -> Device:
    return create_device(DeviceConfig(device="cpu", num_threads=1))


@pytest.fixture
def threads() -> Callable[[], list[threading.Thread]]:
    """Gives the threads of this kind that began during the test and are still there."""
    others = set(threading.enumerate())
    return lambda: [thread for thread in threading.enumerate() if thread not in others and "pages" in thread.name]


def num_waits(thread: threading.Thread) -> int:
    """Voluntary context switches of a thread."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])


def test_few_bytes_of_a_large_cache_are_made_ready_ahead() -> None:
    assert _Pool(1 << 16, 1 << 16).num_ahead == (256 << 20) >> 16
    assert _Pool(64, 1 << 16).num_ahead == 8
    assert _Pool(64, 1 << 30).num_ahead == 1


def new_cache(device: Device) -> tuple[BlockTables, PagedKVCache]:
    config = kv_cache_config(NUM_BLOCKS)
    return BlockTables(device, 2, 4 * NUM_BLOCKS, config), PagedKVCache(device, {LAYER.name: LAYER}, config, None)


def share_handed_out(memory: Tensor) -> float:
    """Share of resident pages among those that lie wholly in this memory."""
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


def test_an_eighth_of_the_cache_is_ready_beyond_what_is_used(
    device: Device, threads: Callable[[], list[threading.Thread]]
) -> None:
    tables, cache = new_cache(device)
    pages = PagePrefaulting(device, tables, cache, StepOrder())
    try:
        wait_for(lambda: pages.num_ready == [NUM_BLOCKS // 8 + 1])
        assert share_handed_out(next(cache.memory_of_blocks(0, 0, NUM_BLOCKS // 8))) == 1
        # Where pages are large, the last one reaches beyond.
        assert share_handed_out(next(cache.memory_of_blocks(0, NUM_BLOCKS // 4, NUM_BLOCKS // 2))) < 0.1

        tables.extend(0, ([100],))
        time.sleep(0.2)  # longer than what an idle worker is known by
        assert pages.num_ready == [NUM_BLOCKS // 8 + 1], "what is ready is enough for a while"

        tables.extend(0, ([NUM_BLOCKS // 8],))
        wait_for(lambda: pages.num_ready == [NUM_BLOCKS // 8 * 2 + 1])

        tables.extend(0, ([NUM_BLOCKS - 1],))
        wait_for(lambda: pages.num_ready == [NUM_BLOCKS])
        wait_for(lambda: not threads())
    finally:
        pages.close()


def test_nothing_is_done_beside_a_step(
    device: Device, threads: Callable[[], list[threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_ready = device.make_pages_ready
    asked: list[Tensor] = []
    steps: StepOrder[Frame] = StepOrder()
    step = Frame(SchedulerOutput(step_id=0), ArithmeticModel())

    def begin_step_at_the_third(memory: Tensor) -> bool:
        asked.append(memory)
        if len(asked) == 3:
            steps.begin(step.output)
        return made_ready(memory)

    monkeypatch.setattr(device, "make_pages_ready", begin_step_at_the_third)
    tables, cache = new_cache(device)
    tables.extend(0, ([NUM_BLOCKS // 2],))
    pages = PagePrefaulting(device, tables, cache, steps)
    try:
        wait_for(lambda: len(asked) >= 3)
        (thread,) = threads()
        enough = num_waits(thread) + 5
        wait_for(lambda: num_waits(thread) >= enough)  # it has looked several times whether the step is over
        assert len(asked) == 3
        steps.wait(0, step)
        steps.take(0)
        wait_for(lambda: pages.num_ready > [NUM_BLOCKS // 2])
    finally:
        pages.close()


def test_a_system_without_it_is_asked_once(
    device: Device, threads: Callable[[], list[threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Tensor] = []
    monkeypatch.setattr(device, "make_pages_ready", lambda memory: bool(asked.append(memory)))
    pages = PagePrefaulting(device, *new_cache(device), StepOrder())
    wait_for(lambda: not threads())
    assert len(asked) == 1
    pages.close()


def test_the_thread_does_not_keep_the_cache(device: Device, threads: Callable[[], list[threading.Thread]]) -> None:
    tables, cache = new_cache(device)
    pages = PagePrefaulting(device, tables, cache, StepOrder())
    gone = weakref.ref(cache)
    assert len(threads()) == 1
    del pages, cache
    gc.collect()
    wait_for(lambda: not threads())
    assert gone() is None


def test_a_worker_ends_its_thread(tmp_path: Path, threads: Callable[[], list[threading.Thread]]) -> None:
    tiny_checkpoint(tmp_path)
    core = make_core(tmp_path, kv_cache_memory_bytes=256 << 20)
    run(core, random_prompts([20], 90), greedy(3))
    assert len(threads()) == 1
    core.close()
    assert not threads()
