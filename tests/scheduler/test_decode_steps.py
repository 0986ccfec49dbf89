"""Steps that continue the one before are those that would be put together anew."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver
from scheduler_fakes import cache_config, full_spec
from test_scheduler_properties import LAYOUTS, MOVES, REQUESTS, SETUPS, play

from penstock.contract import SchedulerOutput
from penstock.scheduler.outputs import EngineCoreOutput
from penstock.scheduler.scheduler import Scheduler

PROMPT = [1, 2, 3, 4, 5]


def _driver(setup: dict[str, Any]) -> Driver:
    setup = dict(setup)
    specs = LAYOUTS[setup.pop("layout")](setup.pop("block_size"))
    return Driver(cache_config(setup.pop("num_blocks"), *specs), **setup)


@settings(max_examples=150, deadline=None)
@given(setup=SETUPS, wanted=st.lists(REQUESTS, min_size=3, max_size=8), moves=st.lists(MOVES, min_size=8, max_size=40))
def test_every_message_equals_that_of_a_scheduler_that_never_continues(
    setup: dict[str, Any], wanted: list[dict[str, Any]], moves: list[tuple[str, int]]
) -> None:
    continuing, plain = _driver(setup), _driver(setup)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_continue_decodes", lambda self, step: None)
        play(plain, wanted, moves)
        plain.drain()
    play(continuing, wanted, moves)
    continuing.drain()
    assert continuing.steps == plain.steps
    assert (continuing.tokens, _untimed(continuing)) == (plain.tokens, _untimed(plain))
    if any(_continues(step, after) for step, after in pairwise(continuing.steps)):
        event("continued")


def _untimed(driver: Driver) -> dict[str, EngineCoreOutput]:
    return {name: msgspec.structs.replace(end, first_scheduled_time=None) for name, end in driver.ends.items()}


def _continues(step: SchedulerOutput, after: SchedulerOutput) -> bool:
    return after.num_scheduled_tokens is step.num_scheduled_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_decodes_share_what_their_messages_have_in_common(depth: int) -> None:
    driver = Driver(cache_config(40), depth=depth)
    for name in ("a", "b"):
        driver.add(name, PROMPT, max_tokens=12, ignore_eos=True)
    for _ in range(4):
        driver.turn()
    before, after = driver.turn(), driver.turn()
    assert _continues(before, after)
    assert after.scheduled_cached_reqs.req_ids is before.scheduled_cached_reqs.req_ids
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
    assert all(_continues(step, after) for step, after in pairwise(steps))
    given = [[blocks is not None for blocks in step.scheduled_cached_reqs.new_block_ids] for step in steps]
    assert [row for row in given if any(row)] == [[False, True], [True, False]] * 2 + [[False, True]]
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
    assert _continues(*steps[-2:])
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
        # Put together anew, and from then on the same: the first step after it shares its lists too.
        assert _continues(output, after := driver.turn())
        assert after.scheduled_cached_reqs.req_ids is output.scheduled_cached_reqs.req_ids
        assert not after.finished_req_ids
    assert set(output.num_scheduled_tokens) == ({"a", "b", "c"} if event_name == "add" else {"a"})
    assert output.finished_req_ids == (set() if event_name == "add" else {"b"})
    driver.drain()
