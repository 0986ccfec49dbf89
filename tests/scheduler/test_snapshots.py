"""Where recurrent states are kept for later requests, and which snapshots make room for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from scheduler_driver import Driver, make_request
from scheduler_fakes import cache_of, full_spec, state_spec

from penstock.scheduler.block_pool import StepIds
from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.state_pool import StatePool

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 3


def driver_of(num_states: int = 40, snapshots: str = "align", max_drafts: int = 0, **options: Any) -> Driver:
    spec = msgspec.structs.replace(state_spec(4, max_drafts), snapshots=snapshots)
    config = cache_of(200, [full_spec(2), spec], num_states=num_states)
    return Driver(config, **{"max_num_batched_tokens": 64, "max_model_len": 200, **options})


def cached(driver: Driver, name: str, prompt: Sequence[int], num_output: int = 1) -> int:
    """Prefix-cache hit of a request, which runs to its end; it has no tokens but these."""
    driver.add(name, list(prompt), max_tokens=num_output, ignore_eos=True)
    driver.drain()
    return driver.ends[name].num_cached_tokens


def states_of(driver: Driver) -> StatePool:
    (pool,) = [pool for pool in driver.scheduler.kv_cache.pools if isinstance(pool, StatePool)]
    return pool


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_the_next_turn_goes_on_from_the_end_of_the_last_one(depth: int, max_drafts: int) -> None:
    driver = driver_of(depth=depth, max_drafts=max_drafts)
    assert cached(driver, "first", PROMPT, num_output=23) == 0
    turn = [*PROMPT, *driver.tokens["first"]]
    # Of 53 tokens the last one is not computed.
    assert cached(driver, "second", [*turn, 7, 7, 7]) == 52
    # The answer again.
    assert cached(driver, "again", PROMPT) == 28


def test_a_prompt_of_whole_blocks_leaves_its_end_for_the_next_turn_too() -> None:
    driver = driver_of()
    cached(driver, "first", PROMPT[:28], num_output=1)
    assert cached(driver, "again", PROMPT[:28]) == 24
    assert cached(driver, "longer", PROMPT) == 28


def test_a_prefix_that_is_seen_twice_gets_a_snapshot_where_prompts_part() -> None:
    driver = driver_of()
    system = list(range(1, 11)) * 2
    found = [cached(driver, f"{tail}", [*system, *[tail] * 20]) for tail in (1, 2, 3, 4)]
    assert found == [0, 0, 20, 20]


def test_the_end_of_a_shared_prefix_is_found_for_states_alone() -> None:
    driver = Driver(cache_of(40, [state_spec(4)]), max_num_batched_tokens=64)
    found = [cached(driver, f"{tail}", [*PROMPT[:10], *[tail] * 10]) for tail in (1, 2, 3)]
    assert found == [0, 0, 8]


def test_with_snapshots_of_all_blocks_there_are_hits_at_every_depth() -> None:
    driver = driver_of(snapshots="all")
    cached(driver, "first", PROMPT)
    found = [cached(driver, f"{length}", [*PROMPT[:length], 11]) for length in range(1, 30)]
    assert found == [length // 4 * 4 for length in range(1, 30)]


def test_without_snapshots_nothing_is_found() -> None:
    driver = driver_of(snapshots="none")
    assert [cached(driver, name, PROMPT) for name in ("first", "again")] == [0, 0]
    assert states_of(driver).num_taken == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_borders_that_a_long_answer_passes_evict_no_snapshot_of_others(depth: int) -> None:
    driver = driver_of(num_states=1 + 8, depth=depth)
    cached(driver, "prompt", PROMPT)
    cached(driver, "long", [9] * 9, num_output=150)
    # The prompt's end, and that of its turn.
    assert states_of(driver).num_taken > 30
    assert cached(driver, "again", PROMPT) == 28
    assert cached(driver, "next", [9] * 9 + driver.tokens["long"]) == 156


def test_the_least_recently_used_snapshot_makes_room_once_none_is_superseded() -> None:
    driver = driver_of(num_states=1 + 4)
    prompts = [[one] * 9 for one in range(1, 6)]
    for number, prompt in enumerate(prompts[:3]):
        assert cached(driver, f"{number}", prompt) == 0
    assert cached(driver, "0 again", prompts[0]) == 8
    assert cached(driver, "3", prompts[3]) == 0
    assert cached(driver, "0 once more", prompts[0]) == 8
    assert cached(driver, "1 again", prompts[1]) == 0
    assert states_of(driver).num_evicted > 0


def test_running_requests_let_go_of_snapshots_that_others_need_for_their_states() -> None:
    # Room for the states of three requests, and nothing else.
    driver = driver_of(num_states=1 + 3)
    for number in range(3):
        driver.add(f"{number}", [number + 1] * 9, max_tokens=40, ignore_eos=True)
        driver.turn()
        driver.turn()
    assert driver.scheduler.num_running == 3
    driver.drain()
    assert driver.scheduler.num_preemptions == 0


def test_a_preempted_request_goes_on_from_its_last_snapshot() -> None:
    driver = driver_of()
    driver.add("r", PROMPT, max_tokens=40, ignore_eos=True)
    for _ in range(16):
        driver.turn()
    driver.scheduler.preempt_all()
    known = driver.requests["r"].num_tokens
    resumed = driver.turn().scheduled_new_reqs[0]
    assert resumed.num_computed_tokens == (known - 1) // 4 * 4 > len(PROMPT)
    driver.drain()


def test_counts_of_snapshots_are_those_of_the_pool() -> None:
    driver = driver_of(num_states=1 + 4)
    for number in range(6):
        cached(driver, f"{number}", [number + 1] * 9)
    pool = states_of(driver)
    assert (pool.num_taken, pool.num_evicted, pool.num_snapshots) == (6, 3, 3)
    assert driver.scheduler.reset_prefix_cache()
    assert (pool.num_taken, pool.num_evicted, pool.num_snapshots) == (6, 3, 0)


def test_no_snapshot_is_found_after_a_reset_or_by_a_new_worker() -> None:
    driver = driver_of()
    for lose in (driver.scheduler.reset_prefix_cache, driver.crash):
        name = lose.__name__
        cached(driver, f"before {name}", PROMPT)
        assert cached(driver, f"found {name}", PROMPT) == 28
        lose()
        assert states_of(driver).num_snapshots == 0
        assert cached(driver, f"after {name}", PROMPT) == 0
        assert driver.scheduler.reset_prefix_cache()


def test_borders_that_an_answer_has_passed_are_not_counted_as_kept() -> None:
    driver = driver_of(num_states=1 + 30)
    cached(driver, "long", PROMPT, num_output=60)
    pool = states_of(driver)
    # Of the prompt, and the last two of the turn.
    assert (pool.num_evicted, pool.num_snapshots) == (0, 3)
    assert pool.num_taken > 10
    # All others make room first.
    for number in range(4):
        cached(driver, f"{number}", [number + 1] * 9, num_output=20)
    assert pool.num_evicted == 0
    assert cached(driver, "again", PROMPT) == 28


def test_stats_count_states_and_blocks_of_positions_apart() -> None:
    driver = driver_of(num_states=1 + 6)
    cached(driver, "ended", PROMPT)
    driver.add("running", [9] * 9, max_tokens=9, ignore_eos=True)
    driver.turn()
    stats = driver.scheduler.stats
    assert (stats.num_blocks, stats.num_used_blocks) == (199, 5)
    # Its own, and the snapshot that it has taken, which can be found with the step's results.
    assert (stats.num_states, stats.num_used_states, stats.num_snapshots) == (6, 2, 2)
    assert stats.kv_cache_usage == 2 / 6
    driver.drain()


def test_a_search_tries_the_depths_of_snapshots_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = KVCacheManager(cache_of(400, [state_spec(4)]), enable_prefix_caching=True, max_num_batched_tokens=2000)
    first = make_request("first", [1] * 1000)
    manager.allocate_slots(first, 1000, manager.get_computed_blocks(first))
    manager.cache_blocks(first, 1000)
    tried = []
    find = StatePool.find
    monkeypatch.setattr(StatePool, "find", lambda pool, key: tried.append(key) or find(pool, key))
    assert manager.get_computed_blocks(make_request("second", [2] * 1500)).num_tokens == 0
    assert len(tried) <= 2


def test_a_held_snapshot_that_is_found_is_not_superseded_any_more() -> None:
    pool = StatePool(4, StepIds())
    found, other = pool.get_new_blocks(2)
    for depth, block in enumerate((found, other), 1):
        pool.cache_snapshot(block, (0, bytes([depth])), depth)
    pool.supersede(found, found.key)
    assert pool.num_snapshots == 1
    pool.touch([found])
    pool.free_blocks([other, found, found])
    assert pool.num_snapshots == 2
    assert pool.get_new_blocks(3)[1:] == [other, found]


def test_superseded_snapshots_are_reused_after_empty_blocks_and_before_all_others() -> None:
    pool = StatePool(6, StepIds())
    empty, old, new, held, hit = pool.get_new_blocks(5)
    for depth, block in enumerate((old, new, held, hit), 1):
        pool.cache_snapshot(block, (0, bytes([depth])), depth)
    pool.free_blocks([old, new, hit, empty])
    for block in (new, held, hit):
        pool.supersede(block, block.key)
    # Who finds it has use for it.
    pool.touch([hit])
    pool.free_blocks([hit, held])
    pool.supersede(old, (0, b"another"))
    pool.supersede(new, new.key)
    pool.check_integrity({})
    assert (pool.num_taken, pool.num_evicted, pool.num_snapshots) == (4, 0, 2)
    assert pool.get_new_blocks(5) == [empty, new, held, old, hit]
    assert (pool.num_taken, pool.num_evicted, pool.num_snapshots) == (4, 2, 0)
    pool.check_integrity(dict.fromkeys((empty, new, held, old, hit), 1))
