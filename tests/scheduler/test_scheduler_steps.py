"""Requests and tokens of each step, and waiting requests."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver
from scheduler_fakes import cache_config, full_spec, window_spec

from penstock.contract import CachedRequestData
from penstock.errors import ContextTooLong, InvalidRequest
from penstock.scheduler.request import RequestStatus

# A prompt whose undisturbed output is long: the tests give ignore_eos where its length matters.
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_a_prompt_in_chunks_as_in_the_reference_trace() -> None:
    driver = Driver(max_num_batched_tokens=4)
    request = driver.add("r", PROMPT, max_tokens=3, ignore_eos=True)

    trace = []
    for _ in range(4):
        output = driver.step()
        before = [new.num_computed_tokens for new in output.scheduled_new_reqs]
        before += output.scheduled_cached_reqs.num_computed_tokens
        results = driver.deliver()
        trace.append(
            (output.num_scheduled_tokens["r"], before[0], len(results), request.num_computed_tokens, request.num_tokens)
        )

    assert trace == [(4, 0, 0, 4, 10), (4, 4, 0, 8, 10), (2, 8, 1, 10, 11), (1, 10, 1, 11, 12)]


def test_a_new_request_is_sent_whole_and_later_only_what_is_new() -> None:
    driver = Driver(max_num_batched_tokens=6)
    request = driver.add("r", PROMPT, max_tokens=3, ignore_eos=True)

    first = driver.turn()
    [new] = first.scheduled_new_reqs
    assert (new.req_id, new.prompt_token_ids, new.prefill_token_ids) == ("r", PROMPT, PROMPT)
    assert new.sampling_params == request.sampling_params
    assert (new.block_ids, new.num_computed_tokens) == (([1, 2],), 0)
    assert first.scheduled_cached_reqs == CachedRequestData()

    second = driver.turn()
    assert second.scheduled_new_reqs == []
    assert second.scheduled_cached_reqs == CachedRequestData(
        req_ids=["r"], new_block_ids=[([3],)], num_computed_tokens=[6]
    )
    third = driver.turn()
    assert third.scheduled_cached_reqs.new_block_ids == []


def test_messages_do_not_change_after_they_were_sent() -> None:
    driver = Driver()
    driver.add("r", PROMPT, max_tokens=8, ignore_eos=True)
    output = driver.turn()
    driver.drain()

    [new] = output.scheduled_new_reqs
    assert new.prefill_token_ids == PROMPT
    assert new.block_ids == ([1, 2, 3],)


def test_running_requests_come_before_waiting_ones() -> None:
    driver = Driver(max_num_batched_tokens=12)
    driver.add("old", PROMPT, max_tokens=9, ignore_eos=True)
    driver.turn()
    driver.add("new", [2] * 20, max_tokens=2)

    output = driver.turn()

    assert output.num_scheduled_tokens == {"old": 1, "new": 11}


def test_no_more_requests_run_than_allowed() -> None:
    driver = Driver(max_num_seqs=2)
    for number in range(3):
        driver.add(f"r{number}", [number + 1], max_tokens=2, ignore_eos=True)

    assert list(driver.turn().num_scheduled_tokens) == ["r0", "r1"]
    assert list(driver.turn().num_scheduled_tokens) == ["r0", "r1"]
    assert list(driver.turn().num_scheduled_tokens) == ["r2"]


def test_a_prompt_is_never_computed_whole_from_the_cache() -> None:
    driver = Driver()
    driver.add("a", PROMPT[:8], max_tokens=1)
    driver.turn()
    driver.add("b", PROMPT[:8], max_tokens=1)

    output = driver.turn()

    assert output.scheduled_new_reqs[0].num_computed_tokens == 4
    assert output.num_scheduled_tokens == {"b": 4}
    assert driver.ends["b"].num_cached_tokens == 4


def test_finished_requests_are_named_in_the_next_step_even_without_tokens() -> None:
    driver = Driver()
    driver.add("r", PROMPT, max_tokens=1)
    driver.turn()
    assert driver.scheduler.has_work()
    assert not driver.scheduler.has_unfinished_requests()

    output = driver.step()

    assert output.finished_req_ids == {"r"}
    assert output.total_num_scheduled_tokens == 0
    assert not driver.scheduler.has_work()
    assert driver.step().finished_req_ids == set()


def test_an_abort_frees_blocks_at_once_and_is_answered_once() -> None:
    driver = Driver()
    driver.add("running", PROMPT)
    driver.turn()
    driver.add("waiting", PROMPT)

    outputs = driver.scheduler.finish_requests(["waiting", "unknown", "running", "running"])

    assert [(output.req_id, output.finish_reason) for output in outputs] == [("waiting", "abort"), ("running", "abort")]
    assert driver.scheduler.kv_cache.num_used_blocks == 0
    # The worker never saw the one that waited.
    assert driver.step().finished_req_ids == {"running"}
    driver.check_empty()


def test_an_id_can_be_used_again_in_the_step_that_ends_it() -> None:
    driver = Driver()
    driver.add("r", PROMPT, max_tokens=9, ignore_eos=True)
    driver.step()
    driver.abort("r")
    driver.add("r", [3] * 7, max_tokens=4, ignore_eos=True)

    output = driver.step()
    assert output.finished_req_ids == {"r"}
    assert output.scheduled_new_reqs[0].prompt_token_ids == [3] * 7
    assert driver.deliver() == []
    driver.drain()
    assert len(driver.tokens["r"]) == 4


def test_preemption_and_return_as_in_the_reference_trace() -> None:
    # Six blocks of four: both prompts fit, but not both with their outputs.
    driver = Driver(cache_config(7), max_num_batched_tokens=32)
    driver.add("first", [1] * 11, max_tokens=5, ignore_eos=True)
    victim = driver.add("second", PROMPT, max_tokens=8, ignore_eos=True)
    while not driver.turn().preempted_req_ids:
        assert victim.status is RequestStatus.RUNNING

    assert driver.steps[-1].preempted_req_ids == {"second"}
    assert driver.steps[-1].num_scheduled_tokens == {"first": 1}
    assert (victim.status, victim.num_computed_tokens, victim.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    known = list(victim.all_token_ids)
    assert len(known) > len(PROMPT)
    while not (output := driver.turn()).scheduled_new_reqs:
        assert output.preempted_req_ids == set()

    [back] = output.scheduled_new_reqs
    assert (back.prompt_token_ids, back.prefill_token_ids) == (PROMPT, known)
    # Its own blocks are still in the cache.
    assert back.num_computed_tokens == 8
    assert output.num_scheduled_tokens["second"] == len(known) - 8
    driver.drain()
    assert driver.ends["second"].num_preemptions == 1
    assert driver.ends["second"].num_cached_tokens == 0
    assert driver.scheduler.num_preemptions == 1


def test_the_last_to_run_is_the_first_to_be_preempted() -> None:
    driver = Driver(cache_config(10), max_num_batched_tokens=32)
    for name in ("a", "b", "c"):
        driver.add(name, PROMPT, max_tokens=10, ignore_eos=True, cache_salt=name)
    while not driver.turn().preempted_req_ids:
        pass

    assert driver.steps[-1].preempted_req_ids == {"c"}
    driver.add("d", [1], max_tokens=1)
    order = []
    while driver.scheduler.num_waiting:
        order += [new.req_id for new in driver.turn().scheduled_new_reqs]
    assert order.index("c") < order.index("d")


def test_a_step_that_preempts_admits_no_request() -> None:
    driver = Driver(cache_config(7), max_num_batched_tokens=32)
    driver.add("first", [1] * 11, max_tokens=8, ignore_eos=True)
    driver.add("second", PROMPT, max_tokens=8, ignore_eos=True)
    driver.turn()
    driver.add("small", [5], max_tokens=1)
    while not (output := driver.turn()).preempted_req_ids:
        if "small" in driver.ends:
            driver.add("small", [5], max_tokens=1)

    assert output.scheduled_new_reqs == []
    assert driver.scheduler.num_waiting == 2


def test_a_step_that_preempts_admits_no_more_urgent_request_either() -> None:
    driver = Driver(cache_config(7), max_num_seqs=2, policy="priority", max_num_batched_tokens=32)
    driver.add("high", [1] * 11, max_tokens=8, ignore_eos=True, priority=0)
    driver.add("low", PROMPT, max_tokens=8, ignore_eos=True, priority=2)
    driver.turn()
    # There is no place for it until "low" loses its own.
    driver.add("middle", [5], max_tokens=1, priority=1)
    while not (output := driver.turn()).preempted_req_ids:
        pass

    assert (output.preempted_req_ids, output.scheduled_new_reqs) == ({"low"}, [])
    assert [new.req_id for new in driver.turn().scheduled_new_reqs][:1] == ["middle"]
    driver.drain()


def test_a_request_waits_until_all_that_is_known_of_it_fits() -> None:
    driver = Driver(cache_config(9), max_num_batched_tokens=8)
    driver.add("first", [1] * 16, max_tokens=4, ignore_eos=True)
    driver.turn()
    # Five blocks for it, four free: its first chunk alone would fit.
    driver.add("second", [2] * 20, max_tokens=2)

    while "first" not in driver.ends:
        assert "second" not in driver.turn().num_scheduled_tokens
    assert driver.turn().num_scheduled_tokens == {"second": 8}
    assert driver.scheduler.num_preemptions == 0


def test_a_full_engine_serves_everyone_in_the_end() -> None:
    driver = Driver(cache_config(9), max_num_seqs=3, max_num_batched_tokens=8)
    for number in range(12):
        driver.add(f"r{number}", [number % 10 + 1] * 9, max_tokens=12, ignore_eos=True)
    driver.drain()

    assert len(driver.ends) == 12
    assert driver.scheduler.num_preemptions > 0
    assert [len(tokens) for tokens in driver.tokens.values()] == [12] * 12
    first_runs = [driver.ends[f"r{number}"].first_scheduled_time or 0.0 for number in range(12)]
    assert first_runs == sorted(first_runs)


def test_priorities_decide_who_runs_first_and_who_is_preempted() -> None:
    driver = Driver(cache_config(10), max_num_batched_tokens=40, policy="priority", max_num_seqs=3)
    for name, priority, arrival_time in [("low", 2, 0.0), ("late", 1, 2.0), ("early", 1, 1.0), ("high", 0, 3.0)]:
        driver.add(
            name, PROMPT, max_tokens=10, ignore_eos=True, priority=priority, arrival_time=arrival_time, cache_salt=name
        )

    assert list(driver.turn().num_scheduled_tokens) == ["high", "early", "late"]
    while not driver.turn().preempted_req_ids:
        pass
    assert driver.steps[-1].preempted_req_ids == {"late"}
    driver.drain()
    ends = list(driver.ends)
    assert ends.index("high") < ends.index("late") < ends.index("low")


def test_a_more_urgent_request_that_comes_later_is_preempted_later() -> None:
    driver = Driver(cache_config(7), max_num_batched_tokens=32, policy="priority")
    driver.add("low", PROMPT, max_tokens=10, ignore_eos=True, priority=1)
    driver.turn()
    driver.add("high", [1] * 11, max_tokens=10, ignore_eos=True, priority=0)
    while not driver.turn().preempted_req_ids:
        pass

    assert driver.steps[-1].preempted_req_ids == {"low"}
    driver.drain()


@pytest.mark.parametrize("length", [16, 17, 400])
def test_a_prompt_without_room_for_an_answer_is_refused(length: int) -> None:
    driver = Driver(max_model_len=16)
    driver.add("fits", [1] * 15, max_tokens=5)
    with pytest.raises(ContextTooLong) as caught:
        driver.add("long", [1] * length)

    assert f"{length:,} tokens" in str(caught.value)
    assert "context of 16" in str(caught.value)
    assert f"max_model_len={length + 1}" in str(caught.value)
    assert driver.scheduler.num_waiting == 1


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompt_that_fills_the_context_has_one_token(async_scheduling: bool) -> None:
    driver = Driver(max_model_len=16, async_scheduling=async_scheduling)
    driver.add("full", [1] * 16, max_tokens=1)
    driver.add("other", [1] * 15, max_tokens=5)
    driver.drain()
    assert [len(driver.tokens[name]) for name in ("full", "other")] == [1, 1]


def test_a_request_that_outgrows_the_cache_is_refused_with_what_would_fit() -> None:
    driver = Driver(cache_config(6), max_model_len=64)
    driver.add("fits", [1] * 10, max_tokens=10)
    with pytest.raises(ContextTooLong) as caught:
        driver.add("long", [1] * 10, max_tokens=11)

    message = str(caught.value)
    assert "10 tokens and may grow to 21" in message
    assert "6 blocks" in message
    assert "there are 5: enough for 20 tokens" in message
    driver.drain()
    assert len(driver.tokens["fits"]) <= 10


def test_what_counts_is_the_length_within_the_context() -> None:
    driver = Driver(cache_config(6), max_model_len=20)

    driver.add("r", [1] * 10, max_tokens=1000, ignore_eos=True)
    driver.drain()

    assert len(driver.tokens["r"]) == 10


def test_a_window_lets_a_long_request_into_a_small_cache() -> None:
    driver = Driver(cache_config(6, window_spec(4)), max_model_len=64, max_num_batched_tokens=8)
    driver.add("r", [1] * 40, max_tokens=20, ignore_eos=True)
    driver.drain()

    assert len(driver.tokens["r"]) == 20
    with pytest.raises(ContextTooLong):
        Driver(cache_config(6, full_spec()), max_model_len=64).add("r", [1] * 40, max_tokens=20)


def test_an_id_in_use_is_refused_and_may_come_back_later() -> None:
    driver = Driver()
    driver.add("r", PROMPT, max_tokens=2)
    with pytest.raises(InvalidRequest, match="'r'"):
        driver.scheduler.add_request(driver.requests["r"])
    driver.drain()
    driver.add("r", PROMPT, max_tokens=2)
    driver.drain()


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        Driver().add("r", [])
