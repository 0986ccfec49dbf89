"""Whatever happens to requests, a subscriber of KV cache events has exactly the blocks of the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver
from scheduler_fakes import cache_of, full_spec, latent_spec, window_spec
from test_scheduler_properties import MOVES, REQUESTS, SETUPS, make_driver, play

from penstock.features.kv_events.event_log import KV_CACHE, EventLog
from penstock.features.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored
from penstock.scheduler.kv_cache_manager import KVCacheManager
from support.event_mirror import EventMirror, block_of


def watch(driver: Driver) -> EventLog:
    manager = driver.scheduler.kv_cache
    log = EventLog(manager.groups, keeps_elsewhere=False)
    manager.watch(log)
    return log


def cached_blocks(manager: KVCacheManager) -> set[tuple[int, int]]:
    return {block_of(block.key) for pool in manager.pools for block in pool.blocks if block.key is not None}


@settings(max_examples=200, deadline=None)
@given(setup=SETUPS, wanted=st.lists(REQUESTS, min_size=3, max_size=8), moves=st.lists(MOVES, min_size=8, max_size=50))
def test_a_subscriber_has_the_blocks_of_the_prefix_cache(
    setup: dict[str, Any], wanted: list[dict[str, Any]], moves: list[tuple[str, int]]
) -> None:
    driver = make_driver(setup)
    log, mirror, manager = watch(driver), EventMirror(), driver.scheduler.kv_cache

    for move in moves:
        play(driver, wanted, [move])
        mirror.take(log.take_events())
        assert mirror.blocks[KV_CACHE] == cached_blocks(manager)
    driver.drain()
    mirror.take(log.take_events())
    assert mirror.blocks[KV_CACHE] == cached_blocks(manager)

    # Its blocks have the texts whose hashes they are.
    for request in driver.requests.values():
        for key in manager.keys_of(request):
            block, size = block_of(key), manager.groups[key[0]].block_size
            if block in mirror.texts:
                text = mirror.texts[block]
                assert text == request.all_token_ids[: len(text)]
                salt = request.cache_salt if len(text) == size else None
                assert mirror.extras[block] == (None if salt is None else (salt,))
    event(f"{bool(mirror.texts)=} {bool(mirror.num_clears)=}")


def test_events_of_consecutive_blocks_are_one_event() -> None:
    driver = Driver(cache_of(12, (full_spec(4), window_spec(6, 4))), max_num_batched_tokens=16)
    log = watch(driver)
    request = driver.add("r0", list(range(1, 15)), max_tokens=4, ignore_eos=True)
    driver.turn()
    full, window = log.take_events()
    first = [block_of(key)[1] for key in driver.scheduler.kv_cache.keys_of(request)[:3]]
    assert full == BlockStored(
        block_hashes=first,
        parent_block_hash=None,
        token_ids=list(range(1, 13)),
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None] * 3,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    assert isinstance(window, BlockStored)
    assert (window.group_idx, window.kv_cache_spec_kind, window.kv_cache_spec_sliding_window) == (
        1,
        "sliding_window",
        6,
    )
    driver.drain()
    next_ones = [one for one in log.take_events() if isinstance(one, BlockStored)]
    assert [one.parent_block_hash for one in next_ones] == [first[-1]] * 2
    # Another request of the same beginning tells nothing new.
    driver.add("r1", [*range(1, 13), 3], max_tokens=1)
    driver.drain()
    assert log.take_events() == []
    assert driver.scheduler.reset_prefix_cache()
    assert log.take_events() == [AllBlocksCleared()]


def test_a_block_is_removed_with_the_last_one_of_its_content() -> None:
    """Requests beside each other compute the same blocks."""
    driver = Driver(cache_of(9, (latent_spec(4),)), max_num_batched_tokens=1, max_num_seqs=2)
    log, mirror = watch(driver), EventMirror()
    for name in ("r0", "r1"):
        driver.add(name, [1] * 8, max_tokens=1)
    driver.drain()
    mirror.take(log.take_events())
    assert len(mirror.blocks[KV_CACHE]) == len(cached_blocks(driver.scheduler.kv_cache)) >= 2
    # Blocks with NaN are gone at once.
    driver.scheduler.kv_cache.forget(driver.requests["r0"])
    mirror.take(log.take_events())
    assert mirror.blocks[KV_CACHE] == cached_blocks(driver.scheduler.kv_cache) == set()
    # Requests that need all blocks evict the others.
    driver.add("r3", [3] * 8, max_tokens=1)
    driver.drain()
    driver.add("r2", [2] * 30, max_tokens=1)
    driver.drain()
    events = log.take_events()
    assert any(isinstance(one, BlockRemoved) for one in events)
    mirror.take(events)
    assert mirror.blocks[KV_CACHE] == cached_blocks(driver.scheduler.kv_cache)


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_hashes_are_the_same_in_every_engine(cut: int) -> None:
    told = []
    for size in (cut, 16):
        driver = Driver(cache_of(12, (full_spec(4),)), max_num_batched_tokens=size)
        log, mirror = watch(driver), EventMirror()
        driver.add("r0", list(range(1, 15)), max_tokens=1)
        driver.drain()
        mirror.take(log.take_events())
        told.append(mirror.texts)
    assert told[0] == told[1]
