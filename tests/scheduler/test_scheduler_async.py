"""Steps that are scheduled before the results of earlier ones are known, and workers that die with steps in flight."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver
from scheduler_fakes import EOS, cache_config, undisturbed

from penstock.contract import SamplingParams
from penstock.scheduler.outputs import FinishReason
from penstock.scheduler.request import RequestStatus

PROMPT = [1, 2, 3, 4, 5, 6, 7]


def prompt_that_ends_after(num_tokens: int) -> list[int]:
    """A prompt whose output has its end-of-sequence token at this place."""
    for first in range(1, 500):
        prompt = [first, 1, 1]
        tokens, _ = undisturbed(prompt, SamplingParams(max_tokens=40), None, 64)
        if len(tokens) == num_tokens and tokens[-1] == EOS:
            return prompt
    raise AssertionError("none found")


def test_a_request_runs_ahead_of_its_results() -> None:
    driver = Driver(depth=3)
    request = driver.add("r", PROMPT, max_tokens=9, ignore_eos=True)

    computed = [driver.step().scheduled_cached_reqs.num_computed_tokens for _ in range(3)]

    assert computed == [[], [7], [8]]
    assert (request.num_tokens, request.num_output_placeholders, request.num_computed_tokens) == (7, 3, 9)
    driver.deliver()
    assert (request.num_tokens, request.num_output_placeholders) == (8, 2)


def test_no_step_is_wasted_beyond_max_tokens() -> None:
    driver = Driver(depth=4)
    driver.add("r", PROMPT, max_tokens=2, ignore_eos=True)

    scheduled = [driver.step().total_num_scheduled_tokens for _ in range(4)]

    assert scheduled == [7, 1, 0, 0]


def test_no_step_is_wasted_beyond_the_context() -> None:
    driver = Driver(depth=4, max_model_len=9)
    driver.add("r", PROMPT, max_tokens=None, ignore_eos=True)

    assert [driver.step().total_num_scheduled_tokens for _ in range(4)] == [7, 1, 0, 0]


def test_what_was_sampled_after_the_end_is_dropped() -> None:
    driver = Driver(depth=3)
    prompt = prompt_that_ends_after(2)
    driver.add("r", prompt, max_tokens=40)
    for _ in range(3):
        driver.step()
    driver.deliver()
    [end] = driver.deliver()

    assert (end.new_token_ids, end.finish_reason) == ([EOS], FinishReason.STOP)
    assert driver.deliver() == []
    assert driver.tokens["r"] == undisturbed(prompt, SamplingParams(max_tokens=40), None, 64)[0]
    driver.drain()


def test_a_synchronous_scheduler_waits_for_the_last_token() -> None:
    driver = Driver(async_scheduling=False)
    driver.add("r", PROMPT, max_tokens=9, ignore_eos=True)

    assert driver.step().total_num_scheduled_tokens == 7
    assert driver.step().total_num_scheduled_tokens == 0
    driver.deliver()
    assert driver.step().total_num_scheduled_tokens == 1
    driver.deliver()
    driver.drain()


def test_a_synchronous_scheduler_goes_on_with_a_prompt() -> None:
    driver = Driver(async_scheduling=False, max_num_batched_tokens=3)
    driver.add("r", PROMPT, max_tokens=2, ignore_eos=True)

    assert [driver.step().total_num_scheduled_tokens for _ in range(4)] == [3, 3, 1, 0]


def preempted_in_flight(prompt: list[int], **params: object) -> Driver:
    """A driver that just preempted "victim" with the result of its prefill still in flight."""
    driver = Driver(cache_config(6), depth=2, max_num_batched_tokens=32)
    driver.add("first", [5] * 12, max_tokens=4, ignore_eos=True)
    driver.add("victim", prompt, **params)
    driver.step()
    output = driver.step()
    # The step in flight may touch its blocks, so they are not free yet.
    assert (output.preempted_req_ids, output.num_scheduled_tokens) == ({"victim"}, {})
    assert len(driver.in_flight) == 1
    return driver


def test_late_tokens_of_a_preempted_request_count_and_are_computed_again() -> None:
    driver = preempted_in_flight([*PROMPT, 8], max_tokens=3, ignore_eos=True)
    request = driver.requests["victim"]
    assert (request.status, request.num_output_placeholders) == (RequestStatus.PREEMPTED, 1)

    [_, late] = driver.deliver()[::-1] if driver.in_flight[0][1].req_ids[0] == "victim" else driver.deliver()

    assert request.num_output_placeholders == 0
    assert request.num_tokens - request.num_prompt_tokens == 1
    assert late is not None
    while not (output := driver.turn()).scheduled_new_reqs:
        pass
    assert output.scheduled_new_reqs[0].prefill_token_ids == request.prompt_token_ids + driver.tokens["victim"][:1]
    driver.drain()


def test_a_preempted_request_does_not_return_before_its_late_tokens() -> None:
    driver = preempted_in_flight([*PROMPT, 8], max_tokens=3, ignore_eos=True)
    driver.abort("first")
    assert driver.scheduler.kv_cache.num_used_blocks == 0

    assert driver.step().total_num_scheduled_tokens == 0
    driver.deliver()
    assert list(driver.step().num_scheduled_tokens) == ["victim"]
    driver.drain()


def test_it_does_not_return_before_them_where_other_blocks_are_free_either() -> None:
    driver = Driver(depth=2)
    driver.add("r", PROMPT, max_tokens=3, ignore_eos=True)
    driver.step()
    driver.scheduler.preempt_all()
    assert driver.scheduler.kv_cache.pools[0].num_free_blocks > driver.scheduler.kv_cache.pools[0].num_pending_blocks

    assert driver.step().num_scheduled_tokens == {}
    [late] = driver.deliver()
    [new] = driver.step().scheduled_new_reqs
    assert new.prefill_token_ids == PROMPT + late.new_token_ids
    driver.drain()


def test_a_preempted_request_may_end_with_its_late_token() -> None:
    driver = preempted_in_flight([*PROMPT, 8], max_tokens=1)

    outputs = {output.req_id: output for output in driver.deliver()}

    assert outputs["victim"].finish_reason is not None
    assert driver.scheduler.num_waiting == 0
    driver.drain()


def test_an_abort_drops_what_is_in_flight() -> None:
    driver = Driver(depth=3)
    driver.add("r", PROMPT, max_tokens=9, ignore_eos=True)
    for _ in range(3):
        driver.step()
    driver.abort("r")

    assert driver.scheduler.kv_cache.num_used_blocks == 0
    assert [driver.deliver() for _ in range(3)] == [[], [], []]
    assert driver.step().finished_req_ids == {"r"}
    driver.check_empty()


def test_after_a_crash_requests_go_on_from_their_known_tokens() -> None:
    driver = Driver(depth=2, max_num_batched_tokens=32)
    names = ["a", "b", "c"]
    for name in names:
        driver.add(name, [ord(name), *PROMPT], max_tokens=6, ignore_eos=True)
    for _ in range(4):
        driver.turn()
    known = {name: list(driver.requests[name].all_token_ids) for name in names}
    assert all(len(driver.tokens[name]) == 3 for name in names)

    driver.crash()

    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (0, 3)
    assert driver.scheduler.kv_cache.num_used_blocks == 0
    back = driver.turn().scheduled_new_reqs
    assert [request.req_id for request in back] == names
    assert [request.prefill_token_ids for request in back] == [known[name] for name in names]
    assert [request.num_computed_tokens for request in back] == [0, 0, 0]
    driver.drain()
    assert all(driver.ends[name].num_preemptions == 1 for name in names)


def test_a_crash_clears_what_the_old_worker_should_have_been_told() -> None:
    driver = Driver()
    driver.add("r", PROMPT)
    driver.turn()
    driver.abort("r")

    driver.crash()

    assert not driver.scheduler.has_work()
    assert driver.step().finished_req_ids == set()


def test_a_request_preempted_before_a_crash_does_not_wait_for_lost_tokens() -> None:
    driver = preempted_in_flight([*PROMPT, 8], max_tokens=3, ignore_eos=True)

    driver.crash()

    assert driver.requests["victim"].num_output_placeholders == 0
    driver.drain()
    assert len(driver.tokens["victim"]) == 3


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_depth_takes_as_many_steps_as_there_are_tokens(depth: int) -> None:
    driver = Driver(depth=depth)
    driver.add("r", PROMPT, max_tokens=8, ignore_eos=True)
    driver.drain()

    assert sum(step.total_num_scheduled_tokens > 0 for step in driver.steps) == 8
