"""Steps that repeat the one before are those that would be put together anew, and say so."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver
from scheduler_fakes import cache_config, full_spec
from test_scheduler_properties import MOVES, REQUESTS, SETUPS, make_driver, play

from penstock.contract import SchedulerOutput
from penstock.scheduler.outputs import EngineCoreOutput

PROMPT = [1, 2, 3, 4, 5]


def _driver(setup: dict[str, Any], **options: Any) -> Driver:
    return make_driver({**setup, **options})


@settings(max_examples=150, deadline=None)
@given(setup=SETUPS, wanted=st.lists(REQUESTS, min_size=3, max_size=8), moves=st.lists(MOVES, min_size=8, max_size=40))
def test_without_fast_paths_every_message_and_token_is_the_same(
    setup: dict[str, Any], wanted: list[dict[str, Any]], moves: list[tuple[str, int]]
) -> None:
    repeating, plain = _driver(setup), _driver(setup, fast_paths="off")
    for driver in (repeating, plain):
        play(driver, wanted, moves)
        driver.drain()
    assert [msgspec.structs.replace(step, repeats_step_id=None) for step in repeating.steps] == plain.steps
    assert (repeating.tokens, _untimed(repeating)) == (plain.tokens, _untimed(plain))
    if any(step.repeats_step_id is not None for step in repeating.steps):
        event("repeated")


def _untimed(driver: Driver) -> dict[str, EngineCoreOutput]:
    return {name: msgspec.structs.replace(end, first_scheduled_time=None) for name, end in driver.ends.items()}


def _repeats(before: SchedulerOutput, after: SchedulerOutput) -> bool:
    """Whether a step says that it repeats this one; the driver checks that it does."""
    return after.repeats_step_id == before.step_id


@pytest.mark.parametrize("depth", [1, 2])
def test_decodes_say_that_they_repeat_the_step_before(depth: int) -> None:
    driver = Driver(cache_config(40), depth=depth)
    for name in ("a", "b"):
        driver.add(name, PROMPT, max_tokens=12, ignore_eos=True)
    for _ in range(4):
        driver.turn()
    before, after = driver.turn(), driver.turn()
    assert _repeats(before, after)
    assert after.scheduled_cached_reqs.new_block_ids == []
    computed = before.scheduled_cached_reqs.num_computed_tokens
    assert after.scheduled_cached_reqs.num_computed_tokens == [count + 1 for count in computed]
    driver.drain()


def test_a_block_that_is_due_does_not_end_it() -> None:
    driver = Driver(cache_config(40))
    driver.add("a", [1] * 5, max_tokens=20, ignore_eos=True)
    driver.add("b", [2] * 7, max_tokens=20, ignore_eos=True)
    driver.turn()
    driver.turn()
    steps = [driver.turn() for _ in range(10)]
    assert all(_repeats(step, after) for step, after in pairwise(steps))
    given = [[blocks is not None for blocks in step.scheduled_cached_reqs.new_block_ids] for step in steps]
    assert [row for row in given if row] == [[False, True], [True, False]] * 2 + [[False, True]]
    driver.drain()


def test_a_block_for_one_group_is_none_for_two() -> None:
    driver = Driver(cache_config(10, full_spec(), full_spec()))
    driver.add("a", [1] * 5, max_tokens=8, ignore_eos=True)
    driver.add("b", [2] * 7, max_tokens=8, ignore_eos=True)
    # Both hold two blocks of each group. The ninth of nine blocks is not enough when b needs its third ones.
    for _ in range(2):
        assert not driver.turn().preempted_req_ids
    assert driver.turn().preempted_req_ids == {"b"}
    driver.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_what_continued_decodes_fill_is_found_while_they_go_on(depth: int) -> None:
    driver = Driver(cache_config(40), depth=depth)
    driver.add("a", PROMPT, max_tokens=40, ignore_eos=True)
    steps = [driver.turn() for _ in range(12)]
    assert _repeats(*steps[-2:])
    known = [*PROMPT, *driver.tokens["a"]]
    driver.add("b", known, max_tokens=1)
    # In blocks of four, and short of the last token, which must run.
    assert driver.turn().scheduled_new_reqs[0].num_computed_tokens == (len(known) - 1) // 4 * 4 >= 12
    driver.drain()


@pytest.mark.parametrize("event_name", ["add", "abort", "end"])
def test_what_comes_or_goes_is_seen_in_the_next_step(event_name: str) -> None:
    driver = Driver(cache_config(40))
    driver.add("a", PROMPT, max_tokens=20, ignore_eos=True)
    driver.add("b", PROMPT, max_tokens=6 if event_name == "end" else 20, ignore_eos=True)
    for _ in range(5):
        driver.turn()
    if event_name == "add":
        driver.add("c", PROMPT, max_tokens=5, ignore_eos=True)
    elif event_name == "abort":
        driver.abort("b")
    else:
        driver.turn()
    output = driver.turn()
    if event_name != "add":
        # Put together anew, and from then on the same.
        assert output.repeats_step_id is None
        assert _repeats(output, after := driver.turn())
        assert not after.finished_req_ids
    assert set(output.num_scheduled_tokens) == ({"a", "b", "c"} if event_name == "add" else {"a"})
    assert output.finished_req_ids == (set() if event_name == "add" else {"b"})
    driver.drain()


def test_a_step_in_which_requests_began_is_not_repeated() -> None:
    driver = Driver(cache_config(40))
    for name in ("a", "b"):
        driver.add(name, [ord(name)], max_tokens=12, ignore_eos=True)
    first, second, third = (driver.turn() for _ in range(3))
    # One token each as well, but the worker learned of them in it.
    assert first.num_scheduled_tokens == second.num_scheduled_tokens
    assert not _repeats(first, second)
    assert _repeats(second, third)
    driver.drain()


def test_a_step_without_tokens_in_between_ends_the_repetition() -> None:
    driver = Driver(cache_config(40), async_scheduling=False, depth=2)
    driver.add("a", PROMPT, max_tokens=12, ignore_eos=True)
    driver.step()
    driver.deliver()
    decode = driver.step()
    # It waits for the result; the step names a request that ended, and is not what the next one repeats.
    driver.add("b", PROMPT, max_tokens=12)
    driver.abort("b")
    between = driver.step()
    driver.deliver()
    after = driver.step()
    driver.deliver()
    assert (decode.num_scheduled_tokens, between.num_scheduled_tokens, after.num_scheduled_tokens) == (
        {"a": 1},
        {},
        {"a": 1},
    )
    assert between.repeats_step_id is None
    assert after.repeats_step_id is None
    assert _repeats(after, driver.turn())
    driver.drain()
