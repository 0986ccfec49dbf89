"""Requests share what a step is about to compute, and begin anew when it was not computed after all.

The fake worker writes all of a step before it reads any of it, and answers nonsense where it read unwritten blocks;
the driver compares every request that ends with an undisturbed run.
"""

from __future__ import annotations

import pytest
from scheduler_driver import Driver
from scheduler_fakes import cache_config, window_spec

from penstock.contract import SampledOutput, SchedulerOutput
from penstock.scheduler.outputs import FinishReason

PREFIX = [1, 2, 3, 4, 5, 6, 7, 8]


def computed(output: SchedulerOutput) -> dict[str, int]:
    """Tokens that the step's new requests found in the cache."""
    return {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}


def add_sharers(driver: Driver, *names: str) -> None:
    for name in names:
        driver.add(name, [*PREFIX, ord(name)], max_tokens=4, ignore_eos=True)


def test_requests_of_one_step_compute_their_common_prefix_once() -> None:
    driver = Driver()
    add_sharers(driver, "a", "b", "c")

    output = driver.turn()

    assert computed(output) == {"a": 0, "b": 8, "c": 8}
    assert output.num_scheduled_tokens == {"a": 9, "b": 1, "c": 1}
    driver.drain()


def test_a_later_chunk_is_shared_by_the_step_that_computes_it() -> None:
    driver = Driver(max_num_batched_tokens=6)
    add_sharers(driver, "a")
    assert driver.turn().num_scheduled_tokens == {"a": 6}
    add_sharers(driver, "b")

    output = driver.turn()

    assert output.num_scheduled_tokens == {"a": 3, "b": 1}
    assert computed(output) == {"b": 8}
    driver.drain()


def test_a_block_that_a_single_token_fills_is_shared_once_that_is_computed() -> None:
    driver = Driver(max_num_batched_tokens=7)
    driver.add("a", PREFIX, max_tokens=4, ignore_eos=True)
    driver.turn()
    add_sharers(driver, "b")
    # The last token of the prompt fills the second block.
    output = driver.turn()
    assert (output.num_scheduled_tokens["a"], computed(output)) == (1, {"b": 4})

    add_sharers(driver, "c")
    assert computed(driver.turn()) == {"c": 8}
    driver.drain()


def test_no_prefix_is_shared_without_the_prefix_cache() -> None:
    driver = Driver(enable_prefix_caching=False, max_num_batched_tokens=32)
    add_sharers(driver, "a", "b")

    assert computed(driver.turn()) == {"a": 0, "b": 0}
    driver.drain()


def test_who_read_what_a_failed_request_should_have_written_begins_anew() -> None:
    driver = Driver(max_num_batched_tokens=32)
    driver.add("bad", [*PREFIX, 9], max_tokens=4)
    # What the second one adds, the third one shares.
    for name in ("b", "c"):
        driver.add(name, [*PREFIX, 1, 1, 1, 1, ord(name)], max_tokens=4, ignore_eos=True)
    assert computed(driver.step(failing=("bad",))) == {"bad": 0, "b": 8, "c": 12}

    assert [output.req_id for output in driver.deliver()] == ["bad"]

    assert computed(driver.turn()) == {"b": 0, "c": 12}
    driver.drain()


def test_other_requests_of_the_step_are_left_alone() -> None:
    driver = Driver(max_num_batched_tokens=32)
    driver.add("bad", [*PREFIX, 9], max_tokens=4)
    add_sharers(driver, "b")
    driver.add("c", [9, 9, 9], max_tokens=4, ignore_eos=True)
    driver.step(failing=("bad",))

    outputs = driver.deliver()

    assert {output.req_id: output.finish_reason for output in outputs} == {"bad": FinishReason.ERROR, "c": None}
    assert driver.scheduler.num_preemptions == 1
    driver.drain()


def test_steps_that_are_in_flight_already_count_for_nothing_either() -> None:
    driver = Driver(depth=3, max_num_batched_tokens=32)
    driver.add("bad", [*PREFIX, 9], max_tokens=4)
    driver.step(failing=("bad",))
    add_sharers(driver, "b")
    assert computed(driver.step()) == {"b": 8}
    add_sharers(driver, "c")
    assert computed(driver.step()) == {"c": 8}

    assert [output.req_id for output in driver.deliver()] == ["bad"]

    # Late results are dropped before their requests return.
    assert computed(driver.step()) == {}
    assert driver.deliver() == []
    assert driver.deliver() == []
    assert computed(driver.step()) == {"b": 0, "c": 8}
    driver.drain()


def test_what_an_aborted_request_made_of_lost_blocks_is_lost_too() -> None:
    driver = Driver(cache_config(33, window_spec(4)), depth=2, max_num_batched_tokens=32)
    driver.add("bad", [*PREFIX, 9], max_tokens=4)
    driver.step(failing=("bad",))
    driver.add("b", [*PREFIX, 1, 1, 1, 1, 2], max_tokens=4)
    assert computed(driver.step()) == {"b": 8}
    driver.abort("b")
    driver.deliver()
    driver.deliver()

    driver.add("c", [*PREFIX, 1, 1, 1, 1, 3], max_tokens=4, ignore_eos=True)

    assert computed(driver.step()) == {"c": 0}
    driver.drain()


@pytest.mark.parametrize("leaves_out_both", [False, True])
def test_results_that_leave_the_first_out_are_harmless(leaves_out_both: bool) -> None:
    driver = Driver(max_num_batched_tokens=32, depth=2)
    driver.add("a", [*PREFIX, 9], max_tokens=4)
    first = driver.step(failing=("a",))
    driver.in_flight.popleft()
    add_sharers(driver, "b")
    second, results = driver.step(), driver.in_flight.popleft()[1]
    driver.scheduler.update_from_output(first, SampledOutput(step_id=first.step_id))
    if leaves_out_both:
        results = SampledOutput(step_id=second.step_id)

    assert driver.scheduler.update_from_output(second, results) == []

    assert computed(driver.turn()) == {"b": 0}
    driver.ends["a"] = driver.ends.get("a")  # type: ignore[assignment]  # ended above, past the driver
    driver.drain()
    assert driver.ends["b"].finish_reason is FinishReason.LENGTH
