"""With concurrent steps, decoding requests are split into microbatches that take turns."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from scheduler_driver import Driver
from scheduler_fakes import cache_config

from penstock.contract import SchedulerOutput


def driver_of(num_steps: int, num_requests: int, *, async_scheduling: bool = True, fast_paths: str = "auto") -> Driver:
    driver = Driver(
        cache_config(200),
        max_num_seqs=16,
        max_num_batched_tokens=64,
        depth=num_steps,
        async_scheduling=async_scheduling,
        fast_paths=fast_paths,
        max_concurrent_steps=num_steps,
    )
    for number in range(num_requests):
        driver.add(f"r{number}", [1 + number, 2, 3], max_tokens=20, ignore_eos=True)
    return driver


def decoding(driver: Driver, num_turns: int) -> list[SchedulerOutput]:
    return [step for step in (driver.turn() for _ in range(num_turns)) if step.num_scheduled_tokens]


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("fast_paths", ["auto", "off"])
@pytest.mark.parametrize(("num_steps", "num_requests"), [(2, 8), (3, 9), (2, 5), (4, 15)])
def test_requests_take_turns(num_steps: int, num_requests: int, fast_paths: str, async_scheduling: bool) -> None:
    driver = driver_of(num_steps, num_requests, async_scheduling=async_scheduling, fast_paths=fast_paths)
    steps = decoding(driver, 5 * num_steps)
    for first in range(len(steps) - num_steps + 1):
        turn = [req_id for step in steps[first : first + num_steps] for req_id in step.num_scheduled_tokens]
        assert len(turn) == len(set(turn)) == num_requests
    most = -(-num_requests // num_steps)
    assert {len(step.num_scheduled_tokens) for step in steps} <= {most, num_requests - most * (num_steps - 1)}
    driver.drain()


def test_steps_of_a_turn_are_repeated() -> None:
    driver = driver_of(3, 9)
    decoding(driver, 9)
    before, after = decoding(driver, 3), decoding(driver, 3)
    assert [step.repeats_step_id for step in after] == [step.step_id for step in before]
    driver.drain()


def test_who_is_left_is_spread_anew() -> None:
    driver = driver_of(2, 8)
    decoding(driver, 6)
    # All of one turn's but one.
    gone = list(driver.turn().num_scheduled_tokens)[1:]
    driver.abort(*gone)
    steps = decoding(driver, 8)[-4:]
    assert all(len(step.num_scheduled_tokens) in (2, 3) for step in steps)
    assert all(one.num_scheduled_tokens.keys().isdisjoint(next_.num_scheduled_tokens) for one, next_ in pairwise(steps))
    driver.drain()


@pytest.mark.parametrize("num_steps", [2, 3])
def test_fewer_requests_than_steps_are_served_alike_and_never_wait(num_steps: int) -> None:
    driver = driver_of(num_steps, num_steps - 1)
    steps = decoding(driver, 12)
    assert len(steps) == 12
    served = Counter(req_id for step in steps for req_id in step.num_scheduled_tokens)
    assert max(served.values()) - min(served.values()) <= 1
    driver.drain()


def test_chunks_of_a_prompt_follow_each_other_at_once() -> None:
    driver = Driver(cache_config(40), max_num_batched_tokens=8, depth=2, async_scheduling=True, max_concurrent_steps=2)
    driver.add("a", list(range(1, 31)), max_tokens=3)
    chunks = [driver.turn().num_scheduled_tokens for _ in range(4)]
    assert chunks == [{"a": 8}, {"a": 8}, {"a": 8}, {"a": 6}]
    driver.drain()
