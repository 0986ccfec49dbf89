"""Failures in parts of the scheduler: each ends the request that caused it, alone, and leaves no trace of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver
from scheduler_fakes import cache_config, cache_of, full_spec, window_spec
from test_scheduler_properties import MOVES, REQUESTS, SETUPS, make_driver, play

from penstock.scheduler import steps_in_flight
from penstock.scheduler.outputs import FinishReason
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.step import StepBuilder

# Functions that a step calls for one request, each with whether it raises before it does anything, or afterwards.
PLACES = [
    (name, when)
    for name, moments in {
        "get_computed_blocks": ("before", "after"),
        "has_room_for": ("before",),
        "find_hit": ("before",),
        "extend": ("before", "after"),
        "allocate_slots": ("before", "after"),
        "touch": ("before",),
        "get_new_blocks": ("before",),
        "admit": ("before", "after"),
        "cache_blocks": ("before", "after"),
        "key": ("before",),
        "cache_full_blocks": ("before", "after"),
        "get_block_ids": ("before",),
        "_add": ("before",),
        "tokens_to_end": ("before", "after"),
        "make_output": ("before", "after"),
        "logprobs_of_rows": ("before",),
    }.items()
    for when in moments
]
# Places, each with the number of calls that go well before.
FAULTS = st.lists(st.tuples(st.sampled_from(PLACES), st.integers(0, 5)), min_size=1, max_size=6)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


class Fault(Exception):
    """Exception that a test makes a part of the scheduler raise."""


class Faults:
    """Functions of one driver's scheduler that raise once, at a call that is counted down to."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._num_calls_left: dict[tuple[str, str], int] = {}
        self.fired: list[str] = []

    def arm(self, name: str, when: str, num_calls_before: int = 0) -> None:
        self._num_calls_left[name, when] = num_calls_before

    @contextmanager
    def planted(self) -> Iterator[None]:
        scheduler = self._driver.scheduler
        manager = scheduler.kv_cache
        owners: list[Any] = [manager, manager._hasher, scheduler._requests.waiting, *manager.pools, *manager.groups]
        with ExitStack() as stack:
            for owner in [*owners, StepBuilder, steps_in_flight]:
                for name in {name for name, _ in PLACES}:
                    if hasattr(owner, name):
                        stack.enter_context(patch.object(owner, name, self._raising(name, getattr(owner, name))))
            yield

    def _raising(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def raising(*args: Any, **kwargs: Any) -> Any:
            self._raise_if_due(name, "before")
            result = function(*args, **kwargs)
            self._raise_if_due(name, "after")
            return result

        return raising

    def _raise_if_due(self, name: str, when: str) -> None:
        left = self._num_calls_left.get((name, when))
        if left is None:
            return
        self._num_calls_left[name, when] = left - 1
        if left == 0:
            del self._num_calls_left[name, when]
            self._driver.num_faults += 1
            self.fired.append(f"{name} {when}")
            raise Fault(name)


@settings(max_examples=300, deadline=None)
@given(
    setup=SETUPS,
    wanted=st.lists(REQUESTS, min_size=3, max_size=8),
    # Blocks are held between steps, where no request is to blame.
    moves=st.lists(MOVES.filter(lambda move: move[0] != "hold"), min_size=8, max_size=50),
    wanted_faults=FAULTS,
)
@pytest.mark.slow
def test_a_fault_ends_one_request_and_no_block_is_lost_or_shared_wrongly(
    setup: dict[str, Any],
    wanted: list[dict[str, Any]],
    moves: list[tuple[str, int]],
    wanted_faults: list[tuple[tuple[str, str], int]],
) -> None:
    driver = make_driver(setup)
    faults = Faults(driver)
    with faults.planted():
        for place, num_calls_before in wanted_faults:
            faults.arm(*place, num_calls_before)
        play(driver, wanted, moves)
        driver.drain()
    assert set(driver.ends) == set(driver.requests)
    assert driver.num_broken_off == driver.num_faults
    for place in faults.fired:
        event(place)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("name", "when"), PLACES, ids=[" ".join(place) for place in PLACES])
def test_an_admission_that_fails_gives_back_its_blocks_and_others_go_on(depth: int, name: str, when: str) -> None:
    driver = Driver(cache_of(40, [full_spec(), window_spec(5)]), depth=depth)
    faults = Faults(driver)
    with faults.planted():
        driver.add("before", PROMPT, max_tokens=4, ignore_eos=True)
        driver.turn()
        faults.arm(name, when)
        for other in ("a", "b"):
            driver.add(other, PROMPT, max_tokens=8, ignore_eos=True, logprobs=1)
        while not driver.num_faults:
            driver.turn()
        driver.drain()
    ended = [req_id for req_id, end in driver.ends.items() if end.finish_reason is FinishReason.ERROR]
    assert len(ended) == driver.num_faults == 1
    assert driver.ends[ended[0]].error == f"The scheduler failed for this request with Fault: {name}"


def test_blocks_that_a_failed_step_would_have_filled_are_not_found() -> None:
    driver = Driver(cache_config(40))
    faults = Faults(driver)
    with faults.planted():
        faults.arm("_add", "before")
        driver.add("a", PROMPT, max_tokens=2)
        driver.turn()
        assert (driver.num_broken_off, driver.scheduler.kv_cache.pools[0].num_free_blocks) == (1, 39)
        driver.add("b", PROMPT, max_tokens=2)
        driver.drain()
    assert driver.ends["b"].num_cached_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_repeated_step_that_cannot_be_is_put_together_anew(depth: int) -> None:
    driver = Driver(cache_config(40), depth=depth)
    faults = Faults(driver)
    with faults.planted():
        for req_id in ("a", "b", "c"):
            driver.add(req_id, PROMPT[:3], max_tokens=20, ignore_eos=True)
        while driver.turn().repeats_step_id is None:
            pass
        # The first two requests get their next block, the last one fails.
        faults.arm("allocate_slots", "before", 2)
        driver.drain()
    assert (driver.num_faults, driver.ends["c"].finish_reason) == (1, FinishReason.ERROR)
    assert driver.ends["a"].finish_reason is FinishReason.LENGTH


def test_without_anyone_to_tell_the_exception_is_raised() -> None:
    driver = Driver()
    scheduler: Scheduler = driver.scheduler
    scheduler._tell_ends = None
    faults = Faults(driver)
    with faults.planted():
        faults.arm("get_computed_blocks", "before")
        driver.add("a", PROMPT)
        with pytest.raises(Fault):
            driver.step()
