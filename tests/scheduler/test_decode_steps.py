"""Steps that continue the one before are those that would be put together anew."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver
from scheduler_fakes import cache_config, undisturbed
from test_scheduler_properties import LAYOUTS, MOVES, REQUESTS, SETUPS, play

from penstock.contract import SamplingParams, SchedulerOutput
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
    setup["num_continuous_decode_steps"] = 1  # several at once are other messages
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
    assert [rows for rows in _rows_given_blocks(steps) if rows] == [[1], [0]] * 2 + [[1]]
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


def test_steps_run_at_once_until_a_block_or_a_limit_is_due() -> None:
    driver = Driver(cache_config(10), num_continuous_decode_steps=16)
    driver.worker.random.randint = lambda low, high: high  # type: ignore[method-assign]
    driver.add("a", [1] * 5, max_tokens=20, ignore_eos=True)
    driver.add("b", [2] * 7, max_tokens=12, ignore_eos=True)
    steps = [driver.turn() for _ in range(10)]
    # Blocks of 4: b needs one, and a gets its next one too, two steps ahead. In the fifth, b reaches its limit.
    assert [step.max_steps for step in steps] == [1, 1, 4, 4, 2, 1, 7, 1, 1, 1]
    assert [len(step.num_scheduled_tokens) for step in steps] == [2] * 5 + [1] * 2 + [0] * 3
    assert _rows_given_blocks(steps[2:5]) == [[0, 1], [0, 1], [1]]
    assert driver.ends.keys() == {"a", "b"}
    driver.drain()


def test_scarce_blocks_are_given_when_they_are_due() -> None:
    driver = Driver(cache_config(8), num_continuous_decode_steps=16)
    driver.worker.random.randint = lambda low, high: high  # type: ignore[method-assign]
    driver.add("a", [1] * 5, max_tokens=20, ignore_eos=True)
    driver.add("b", [2] * 7, max_tokens=12, ignore_eos=True)
    steps = [driver.turn() for _ in range(5)]
    # The last of 7 blocks is b's, who needs it now; a needs the next one, and b gives way.
    assert _rows_given_blocks(steps[2:4]) == [[0, 1], [1]]
    assert [step.max_steps for step in steps] == [1, 1, 4, 2, 1]
    assert steps[4].preempted_req_ids == {"b"}
    driver.drain()


def _rows_given_blocks(steps: list[SchedulerOutput]) -> list[list[int]]:
    return [
        [row for row, blocks in enumerate(step.scheduled_cached_reqs.new_block_ids) if blocks is not None]
        for step in steps
    ]


def test_stop_strings_are_looked_for_after_every_step() -> None:
    driver = Driver(cache_config(40), num_continuous_decode_steps=16)
    driver.add("a", PROMPT, max_tokens=12, ignore_eos=True)
    driver.add("b", PROMPT, max_tokens=12, ignore_eos=True, stop=("x",))
    for _ in range(6):
        assert driver.turn().max_steps == 1
    driver.drain()


def test_tokens_beyond_the_end_of_a_request_are_dropped() -> None:
    driver = Driver(cache_config(40), num_continuous_decode_steps=16)
    driver.worker.random.randint = lambda low, high: high  # type: ignore[method-assign]
    prompt = next([first, 2, 3, 4] for first in range(1, 99) if _length_of_output([first, 2, 3, 4]) in (10, 11))
    driver.add("a", prompt, max_tokens=40)
    driver.drain()  # which compares the tokens with those of an undisturbed run
    assert max(driver.worker.num_steps_at_once) > 1
    # What was computed beyond the end is not found by others.
    driver.add("b", [*prompt, *driver.tokens["a"], 1, 2, 3, 4, 5], max_tokens=3)
    driver.drain()


def test_all_requests_must_have_run_as_often() -> None:
    driver = Driver(cache_config(40), num_continuous_decode_steps=16)
    for name in ("a", "b"):
        driver.add(name, PROMPT, max_tokens=12, ignore_eos=True)
    while driver.step().max_steps == 1:
        driver.deliver()
    output, results = driver.in_flight.popleft()
    results = msgspec.structs.replace(results, sampled_token_ids=[[1, 2], [1]], logprobs=None)
    outputs = driver.scheduler.update_from_output(output, results)
    assert [output.error for output in outputs] == [
        None,
        f"The worker sampled 1 tokens in step {output.step_id} instead of 2.",
    ]


def _length_of_output(prompt: list[int]) -> int:
    return len(undisturbed(prompt, SamplingParams(max_tokens=40), None, 64)[0])
