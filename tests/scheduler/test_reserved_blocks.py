"""Requests that hold blocks while they wait, into which keys and values are loaded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver
from scheduler_fakes import cache_config, fingerprints, full_spec, window_spec

from penstock.scheduler.outputs import FinishReason

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
LOAD = "its keys and values"


def reserve(driver: Driver, req_id: str, num_tokens: int) -> tuple[list[int], ...] | None:
    block_ids = driver.scheduler.reserve_blocks(req_id, num_tokens, LOAD)
    driver.scheduler.kv_cache.check_integrity()
    return block_ids


def load(driver: Driver, req_id: str, block_ids: tuple[list[int], ...], num_tokens: int) -> None:
    """Write what belongs into the blocks of a request, and say so."""
    request = driver.requests[req_id]
    values = fingerprints(request.all_token_ids, request.cache_salt)
    for group, ids in enumerate(block_ids):
        size = driver.config.groups[group].spec.block_size
        for position in range(num_tokens):
            driver.worker.contents[(0, ids[position // size]), position % size] = (group, values[position])
    driver.scheduler.blocks_loaded(req_id, num_tokens, LOAD)
    driver.scheduler.kv_cache.check_integrity()


@pytest.mark.parametrize("specs", [(), (full_spec(), window_spec(6))])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_runs_behind_what_was_loaded_into_its_blocks(depth: int, specs: tuple[Any, ...]) -> None:
    driver = Driver(cache_config(40, *specs), depth=depth)
    driver.add("a", PROMPT, max_tokens=6, ignore_eos=True)
    block_ids = reserve(driver, "a", 8)
    assert block_ids is not None
    driver.add("b", [9] * 5, max_tokens=3, ignore_eos=True)
    assert list(driver.turn().num_scheduled_tokens) == ["b"]
    load(driver, "a", block_ids, 8)
    [new] = driver.turn().scheduled_new_reqs
    assert (new.req_id, new.num_computed_tokens) == ("a", 8)
    assert all(ids[:2] == reserved for ids, reserved in zip(new.block_ids, block_ids, strict=True))
    # Others find it as if it had been computed.
    driver.add("c", PROMPT, max_tokens=3, ignore_eos=True)
    driver.drain()
    assert driver.ends["c"].num_cached_tokens == 8


@pytest.mark.parametrize("num_loaded", [0, 3, 4, 7])
def test_only_whole_blocks_count_and_a_load_that_fails_is_computed(num_loaded: int) -> None:
    driver = Driver(max_num_batched_tokens=32)
    driver.add("a", PROMPT, max_tokens=4, ignore_eos=True)
    block_ids = reserve(driver, "a", 10)
    assert [len(ids) for ids in block_ids or ()] == [2]
    load(driver, "a", block_ids or (), num_loaded)
    [new] = driver.turn().scheduled_new_reqs
    assert new.num_computed_tokens == num_loaded // 4 * 4
    driver.drain()


def test_blocks_of_a_request_that_is_aborted_while_it_waits_are_free_once_the_transfer_lets_go() -> None:
    driver = Driver()
    driver.add("a", PROMPT)
    reserve(driver, "a", 8)
    driver.hold("a", "transfer")
    driver.abort("a")
    pool = driver.scheduler.kv_cache.pools[0]
    assert pool.num_used_blocks == 2
    driver.release("a", "transfer")
    assert pool.num_used_blocks == 0
    driver.scheduler.blocks_loaded("a", 8, LOAD)
    driver.drain()


def test_cached_prefixes_are_not_reset_while_a_waiting_request_holds_blocks() -> None:
    driver = Driver()
    driver.add("a", PROMPT)
    reserve(driver, "a", 8)
    assert not driver.scheduler.reset_prefix_cache()
    driver.scheduler.preempt_all()
    assert driver.scheduler.reset_prefix_cache()
    # What arrives late is not in any block.
    driver.scheduler.blocks_loaded("a", 8, LOAD)
    assert driver.turn().scheduled_new_reqs[0].num_computed_tokens == 0
    driver.drain()


def test_a_worker_that_is_replaced_has_nothing_of_what_was_loaded() -> None:
    driver = Driver()
    driver.add("a", PROMPT, max_tokens=3)
    driver.add("b", PROMPT, max_tokens=3)
    loaded, loading = reserve(driver, "a", 8), reserve(driver, "b", 8)
    assert loaded is not None
    assert loading is not None
    load(driver, "a", loaded, 8)
    driver.crash()
    load(driver, "b", loading, 8)
    assert {new.req_id: new.num_computed_tokens for new in driver.turn().scheduled_new_reqs}["a"] == 0
    driver.drain()


def test_a_pool_full_of_requests_that_wait_with_blocks_serves_all() -> None:
    driver = Driver(cache_config(9), max_num_batched_tokens=32)
    driver.add("first", [7] * 20, max_tokens=4, ignore_eos=True, waits_for={"its grammar"})
    loads = {}
    for name in ("a", "b", "c"):
        driver.add(name, [ord(name) % 9 + 1] * 11, max_tokens=12, ignore_eos=True)
        loads[name] = reserve(driver, name, 8)
    driver.scheduler.ready("first", "its grammar")
    # Of eight blocks it needs five, and two are free; what is being loaded keeps its blocks.
    assert driver.turn().num_scheduled_tokens == {}
    for name, block_ids in loads.items():
        assert block_ids is not None
        load(driver, name, block_ids, 8)
    [first, second] = driver.turn().scheduled_new_reqs
    assert (first.req_id, second.req_id, second.num_computed_tokens) == ("first", "a", 8)
    driver.drain()
    assert {end.finish_reason for end in driver.ends.values()} == {FinishReason.LENGTH}


def test_a_prefix_that_was_never_computed_is_given_back_by_a_request_that_waits_with_it() -> None:
    driver = Driver(depth=2, max_num_batched_tokens=32)
    driver.add("bad", [*PROMPT, 2, 2, 2], max_tokens=3)
    driver.step(failing=("bad",))
    driver.add("a", [*PROMPT, 3, 3, 3, 3, 3], max_tokens=3, ignore_eos=True)
    block_ids = reserve(driver, "a", 12)
    assert block_ids is not None
    driver.deliver()
    assert not driver.scheduler.kv_cache.holds(driver.requests["a"])
    driver.scheduler.blocks_loaded("a", 12, LOAD)
    assert driver.turn().scheduled_new_reqs[0].num_computed_tokens == 0
    driver.drain()


_NAMES = ("a", "b", "c", "d", "e")
_MOVES = st.tuples(
    st.sampled_from(["reserve", "load", "fail", "turn", "abort", "crash", "preempt"]), st.sampled_from(_NAMES)
)


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(9, 30),
    depth=st.integers(1, 3),
    lengths=st.lists(st.integers(2, 20), min_size=5, max_size=5),
    moves=st.lists(_MOVES, max_size=40),
)
def test_whatever_happens_no_block_is_lost_and_all_requests_are_served(
    num_blocks: int, depth: int, lengths: list[int], moves: list[tuple[str, str]]
) -> None:
    driver = Driver(cache_config(num_blocks), depth=depth)
    for name, length in zip(_NAMES, lengths, strict=True):
        driver.add(name, (PROMPT * 2)[:length], max_tokens=8)
    loads: dict[str, tuple[list[int], ...]] = {}
    for move, name in moves:
        if move == "reserve":
            block_ids = reserve(driver, name, 16)
            if block_ids is not None:
                loads[name] = block_ids
        elif move in ("load", "fail") and name in loads:
            block_ids = loads.pop(name)
            is_held = driver.scheduler.kv_cache.holds(driver.requests[name])
            num_tokens = 4 * len(block_ids[0]) if move == "load" and is_held else 0
            load(driver, name, block_ids, num_tokens)
        elif move == "turn":
            driver.turn()
        elif move == "abort":
            driver.abort(name)
        elif move == "crash":
            driver.crash()
        elif move == "preempt":
            driver.scheduler.preempt_all()
    for name in loads:
        driver.scheduler.blocks_loaded(name, 0, LOAD)
    driver.drain()
    assert set(driver.ends) == set(_NAMES)
