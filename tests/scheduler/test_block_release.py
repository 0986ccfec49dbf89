"""Blocks are freed when neither a step in flight nor another holder can touch them."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver
from scheduler_fakes import cache_config, window_spec

from penstock.errors import LifecycleError

PROMPT = [1, 2, 3, 4, 5]


def free_and_pending(driver: Driver) -> tuple[int, int]:
    pool = driver.scheduler.kv_cache.pools[0]
    return pool.num_free_blocks, pool.num_pending_blocks


def test_blocks_of_an_aborted_request_are_free_when_its_last_step_is_done() -> None:
    driver = Driver(cache_config(7), depth=3)
    driver.add("r", PROMPT, max_tokens=9, ignore_eos=True)
    driver.step()
    driver.step()
    driver.abort("r")
    assert free_and_pending(driver) == (4, 2)
    driver.add("s", [2] * 20, max_tokens=1)

    assert driver.step().num_scheduled_tokens == {}
    driver.deliver()
    assert free_and_pending(driver) == (4, 2)
    assert driver.step().num_scheduled_tokens == {}
    driver.deliver()
    assert free_and_pending(driver) == (6, 0)
    assert driver.step().num_scheduled_tokens == {"s": 16}
    driver.drain()


def test_without_steps_in_flight_they_are_free_at_once() -> None:
    driver = Driver(cache_config(7))
    driver.add("r", PROMPT, max_tokens=9, ignore_eos=True)
    driver.turn()
    driver.abort("r")

    assert free_and_pending(driver) == (6, 0)


def test_what_is_found_while_it_is_pending_is_held_again() -> None:
    driver = Driver(cache_config(7), depth=2)
    driver.add("r", PROMPT, max_tokens=9, ignore_eos=True)
    driver.step()
    driver.abort("r")
    driver.add("s", PROMPT, max_tokens=1)

    output = driver.step()

    assert output.scheduled_new_reqs[0].num_computed_tokens == 4
    assert output.scheduled_new_reqs[0].block_ids[0][0] == driver.steps[0].scheduled_new_reqs[0].block_ids[0][0]
    assert driver.scheduler.kv_cache.pools[0].num_pending_blocks == 1
    driver.drain()


def test_who_needs_blocks_that_are_pending_waits_and_preempts_no_request() -> None:
    driver = Driver(cache_config(6), depth=2, max_num_batched_tokens=32)
    driver.add("a", [1] * 7, max_tokens=9, ignore_eos=True)
    driver.add("b", [2] * 5, max_tokens=9, ignore_eos=True)
    driver.add("c", [3] * 3, max_tokens=9, ignore_eos=True)
    driver.turn()
    driver.turn()
    driver.abort("c")
    assert free_and_pending(driver) == (0, 1)

    # Its third block is pending. Of those behind it, b needs none and goes on.
    waiting = driver.step()

    assert (waiting.num_scheduled_tokens, waiting.preempted_req_ids) == ({"b": 1}, set())
    driver.deliver()
    assert free_and_pending(driver) == (1, 0)
    assert driver.step().num_scheduled_tokens == {"a": 1, "b": 1}
    assert driver.scheduler.num_preemptions == 0


def test_those_behind_do_not_take_what_a_request_waits_for() -> None:
    driver = Driver(cache_config(5), depth=2)
    driver.add("a", [1] * 4, max_tokens=9, ignore_eos=True)
    driver.add("b", [2] * 4, max_tokens=9, ignore_eos=True)
    driver.add("c", [3] * 2, max_tokens=9)
    driver.step()
    driver.abort("c")
    assert free_and_pending(driver) == (1, 1)
    driver.scheduler.update_draft_token_ids({"a": [-1] * 4})
    driver.add("d", [4], max_tokens=1)

    # The first needs both, the second one of them, and so does the one that comes.
    assert driver.step().num_scheduled_tokens == {}
    driver.deliver()
    output = driver.step()
    assert (output.num_scheduled_tokens, output.preempted_req_ids) == ({"a": 5}, {"b"})
    driver.drain()


def test_a_window_in_the_smallest_cache_goes_on_with_steps_in_flight() -> None:
    driver = Driver(cache_config(7, window_spec(3)), depth=2, max_num_batched_tokens=16)
    driver.add("r", [1] * 60, max_tokens=4, ignore_eos=True)
    driver.drain()

    assert len(driver.tokens["r"]) == 4
    assert driver.scheduler.num_preemptions == 0


@pytest.mark.parametrize("seed", range(4))
def test_who_is_ahead_by_drafts_in_flight_waits_for_them_before_it_gives_way(seed: int) -> None:
    # Just enough for its window and the tokens of a step, if it is where its tokens are.
    driver = Driver(cache_config(5, window_spec(4)), depth=3, max_num_batched_tokens=6, max_drafts=5, seed=seed)
    driver.add("r", [1] * 20, max_tokens=40, ignore_eos=True)
    driver.drain()

    assert len(driver.tokens["r"]) == 40
    assert driver.scheduler.num_preemptions == 0


@pytest.mark.parametrize("end", ["finish", "preempt", "abort"])
def test_what_a_request_else_holds_is_kept_beyond_the_request(end: str) -> None:
    driver = Driver(cache_config(7), max_num_batched_tokens=32)
    driver.add("r", PROMPT, max_tokens=2, ignore_eos=True)
    driver.turn()
    driver.hold("r", "transfer")
    if end == "preempt":
        driver.scheduler.preempt_all()
        driver.abort("r")
    elif end == "abort":
        driver.abort("r")
    else:
        driver.turn()
    assert free_and_pending(driver) == (4, 0)
    driver.add("s", [2] * 18, max_tokens=1)

    assert driver.step().num_scheduled_tokens == {}
    assert not driver.scheduler.reset_prefix_cache()
    driver.release("r", "transfer")
    assert driver.step().num_scheduled_tokens == {"s": 18}
    driver.drain()


def test_a_hold_that_ends_with_steps_in_flight_ends_after_them() -> None:
    driver = Driver(cache_config(7), depth=2)
    driver.add("r", PROMPT, max_tokens=9, ignore_eos=True)
    driver.step()
    driver.hold("r", "transfer")
    driver.abort("r")
    assert free_and_pending(driver) == (4, 0)

    driver.release("r", "transfer")

    assert free_and_pending(driver) == (4, 2)
    driver.deliver()
    assert free_and_pending(driver) == (6, 0)


def test_each_holder_holds_for_itself() -> None:
    driver = Driver()
    driver.add("r", PROMPT, max_tokens=9, ignore_eos=True)
    driver.turn()
    manager = driver.scheduler.kv_cache
    for holder in ("one", "two"):
        driver.hold("r", holder)
    driver.abort("r")
    with pytest.raises(LifecycleError, match=r"'one' cannot hold blocks of request 'r'"):
        manager.hold_blocks("r", "one")
    driver.release("r", "one")
    with pytest.raises(LifecycleError, match="'one' holds no blocks of request 'r'"):
        manager.release_blocks("r", "one")

    assert manager.pools[0].num_used_blocks == 2
    driver.release("r", "two")
    assert manager.pools[0].num_used_blocks == 0


def test_no_request_holds_the_same_twice() -> None:
    driver = Driver()
    driver.add("r", PROMPT, max_tokens=9, ignore_eos=True)
    driver.turn()
    driver.hold("r", "one")
    with pytest.raises(LifecycleError, match="'one' holds blocks of request 'r' already"):
        driver.scheduler.kv_cache.hold_blocks("r", "one")


def test_after_a_crash_what_is_held_is_kept_and_holds_nothing_worth_finding() -> None:
    driver = Driver(depth=2)
    driver.add("r", [1] * 9, max_tokens=4, ignore_eos=True)
    driver.step()
    driver.hold("r", "transfer")

    driver.crash()

    assert driver.scheduler.kv_cache.num_used_blocks == 3
    assert driver.step().scheduled_new_reqs[0].num_computed_tokens == 0
    driver.drain()
