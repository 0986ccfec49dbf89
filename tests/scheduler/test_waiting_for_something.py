"""Requests that are not ready are passed over, keep their place, and are not forgotten."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver
from scheduler_fakes import cache_config

from penstock.scheduler.outputs import FinishReason

PROMPT = [1, 2, 3, 4, 5]


def test_those_behind_go_on_and_it_is_first_again_when_it_is_ready() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add("a", PROMPT, max_tokens=2, waits_for={"its grammar"})
    for name in ("b", "c"):
        driver.add(name, PROMPT, max_tokens=2, ignore_eos=True)

    assert [list(driver.turn().num_scheduled_tokens) for _ in range(2)] == [["b"], ["b"]]
    driver.scheduler.ready("a", "its grammar")
    assert list(driver.turn().num_scheduled_tokens) == ["a"]
    driver.drain()


def test_every_reason_counts() -> None:
    driver = Driver()
    driver.add("a", PROMPT, max_tokens=2)
    driver.scheduler.wait_for("a", "its adapter")
    driver.scheduler.wait_for("a", "its grammar")
    driver.scheduler.wait_for("a", "its grammar")
    driver.scheduler.ready("a", "its grammar")
    assert driver.turn().num_scheduled_tokens == {}
    driver.scheduler.ready("a", "something else")
    assert driver.turn().num_scheduled_tokens == {}

    driver.scheduler.ready("a", "its adapter")

    assert driver.turn().num_scheduled_tokens == {"a": 5}
    driver.drain()


def test_which_one_runs_is_seen_to_be_ready_while_the_others_decode() -> None:
    driver = Driver()
    driver.add("a", PROMPT, max_tokens=20, ignore_eos=True)
    driver.add("b", PROMPT, max_tokens=2, waits_for={"its grammar"})
    steps = [driver.turn() for _ in range(4)]
    # Who is not ready does not keep steps from being repeated.
    assert steps[-1].repeats_step_id == steps[-2].step_id

    driver.scheduler.ready("b", "its grammar")

    assert list(driver.turn().num_scheduled_tokens) == ["a", "b"]
    driver.drain()


def test_priorities_count_among_those_that_are_ready() -> None:
    driver = Driver(max_num_seqs=1, policy="priority")
    driver.add("urgent", PROMPT, max_tokens=1, priority=0, waits_for={"its grammar"})
    driver.add("late", PROMPT, max_tokens=1, priority=2)
    driver.add("soon", PROMPT, max_tokens=1, priority=1)

    assert list(driver.turn().num_scheduled_tokens) == ["soon"]
    driver.scheduler.ready("urgent", "its grammar")
    assert [list(driver.turn().num_scheduled_tokens) for _ in range(2)] == [["urgent"], ["late"]]
    driver.drain()


def test_a_preempted_request_waits_for_what_it_needs() -> None:
    driver = Driver()
    driver.add("a", PROMPT, max_tokens=9, ignore_eos=True)
    driver.turn()
    driver.scheduler.wait_for("a", "its adapter")
    assert driver.turn().num_scheduled_tokens == {"a": 1}
    driver.scheduler.preempt_all()
    driver.add("b", PROMPT, max_tokens=2, ignore_eos=True)
    assert list(driver.turn().num_scheduled_tokens) == ["b"]

    driver.scheduler.ready("a", "its adapter")

    assert list(driver.turn().num_scheduled_tokens) == ["b", "a"]
    driver.drain()


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_abort_reaches_who_is_not_ready(is_alone: bool) -> None:
    driver = Driver(cache_config(9))
    driver.add("a", PROMPT, waits_for={"its grammar"})
    if not is_alone:
        driver.add("b", PROMPT, max_tokens=2)
    assert driver.scheduler.num_waiting == (1 if is_alone else 2)
    driver.abort("a")
    driver.scheduler.ready("a", "its grammar")
    driver.scheduler.wait_for("a", "its grammar")

    assert driver.ends["a"].finish_reason is FinishReason.ABORT
    driver.drain()
