"""Results of steps: stops, errors, log-probabilities, and results that fit no step."""

from __future__ import annotations

import re

import msgspec
import pytest
from scheduler_driver import Driver
from scheduler_fakes import EOS, cache_config, undisturbed

from penstock.contract import LogprobsLists, SampledOutput, SamplingParams, SchedulerOutput
from penstock.errors import LifecycleError
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason

PROMPT = [1, 2, 3, 4, 5]


def answer(output: SchedulerOutput, *tokens: int, **fields: object) -> SampledOutput:
    """Results with one token for each request, in scheduling order, or with none at all."""
    req_ids = list(output.num_scheduled_tokens)
    return SampledOutput(
        step_id=output.step_id,
        req_ids=req_ids,
        sampled_token_ids=[[token] for token in tokens] or [[] for _ in req_ids],
        **fields,  # type: ignore[arg-type]
    )


def sample(driver: Driver, *tokens: int) -> list[EngineCoreOutput]:
    """Run one step in which the requests sample these tokens."""
    output = driver.scheduler.schedule()
    return driver.scheduler.update_from_output(output, answer(output, *tokens))


def test_the_end_of_sequence_token_stops_and_is_part_of_the_output() -> None:
    driver = Driver()
    request = driver.add("r", PROMPT)
    sample(driver, 5)
    [output] = sample(driver, EOS)

    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([EOS], FinishReason.STOP, None)
    assert request.all_token_ids[request.num_prompt_tokens :] == [5, EOS]


def test_the_end_of_sequence_token_can_be_ignored() -> None:
    driver = Driver()
    driver.add("r", PROMPT, ignore_eos=True)
    [output] = sample(driver, EOS)

    assert (output.new_token_ids, output.finish_reason) == ([EOS], None)


def test_a_stop_token_stops_and_is_named() -> None:
    driver = Driver()
    driver.add("r", PROMPT, stop_token_ids=(7, 8))
    assert sample(driver, 6)[0].finish_reason is None
    [output] = sample(driver, 8)

    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, 8)


def test_an_ignored_end_of_sequence_token_still_stops_as_a_stop_token() -> None:
    driver = Driver()
    driver.add("r", PROMPT, stop_token_ids=(EOS,), ignore_eos=True)

    assert sample(driver, EOS)[0].stop_reason == EOS


def test_the_end_of_sequence_comes_before_stop_tokens_and_both_before_length() -> None:
    driver = Driver()
    driver.add("a", PROMPT, stop_token_ids=(EOS,), max_tokens=1)
    driver.add("b", PROMPT, stop_token_ids=(7,), max_tokens=1)
    driver.add("c", PROMPT, max_tokens=1)
    outputs = sample(driver, EOS, 7, 7)

    assert [(output.finish_reason, output.stop_reason) for output in outputs] == [
        (FinishReason.STOP, None),
        (FinishReason.STOP, 7),
        (FinishReason.LENGTH, None),
    ]


@pytest.mark.parametrize(("max_tokens", "max_model_len", "num_output"), [(3, 64, 3), (None, 9, 4), (100, 9, 4)])
def test_length_ends_at_max_tokens_or_at_the_end_of_the_context(
    max_tokens: int | None, max_model_len: int, num_output: int
) -> None:
    driver = Driver(max_model_len=max_model_len)
    driver.add("r", PROMPT, max_tokens=max_tokens)
    reasons = []
    while driver.scheduler.has_unfinished_requests():
        reasons += [output.finish_reason for output in sample(driver, 5)]

    assert reasons == [None] * (num_output - 1) + [FinishReason.LENGTH]


def test_outputs_come_in_batch_order_and_tell_the_history() -> None:
    driver = Driver(max_num_batched_tokens=64)
    driver.add("long", [1] * 9, max_tokens=5, ignore_eos=True)
    driver.add("short", [2] * 3, max_tokens=5, ignore_eos=True)
    driver.step()
    outputs = driver.deliver()

    assert [output.req_id for output in outputs] == ["short", "long"]
    assert all(output.first_scheduled_time is not None for output in outputs)
    assert [output.num_preemptions for output in outputs] == [0, 0]


def test_a_chunk_that_samples_nothing_has_no_output() -> None:
    driver = Driver(max_num_batched_tokens=4)
    driver.add("r", PROMPT)
    driver.step()

    assert driver.deliver() == []


def test_each_request_gets_its_row_of_logprobs_and_the_columns_it_asked_for() -> None:
    driver = Driver()
    driver.add("none", [1])
    driver.add("two", [2], logprobs=2)
    driver.add("sampled", [3], logprobs=0)
    output = driver.scheduler.schedule()
    logprobs = LogprobsLists(
        logprob_token_ids=[[5, 51, 52, 53], [6, 61, 62, 63], [7, 71, 72, 73]],
        logprobs=[[-1.0, -1.1, -1.2, -1.3], [-2.0, -2.1, -2.2, -2.3], [-3.0, -3.1, -3.2, -3.3]],
        sampled_token_ranks=[1, 2, 3],
    )
    results = answer(output, 5, 6, 7, logprobs=logprobs)

    news = driver.scheduler.update_from_output(output, results)

    assert [new.new_logprobs for new in news] == [
        None,
        LogprobsLists(logprob_token_ids=[[6, 61, 62]], logprobs=[[-2.0, -2.1, -2.2]], sampled_token_ranks=[2]),
        LogprobsLists(logprob_token_ids=[[7]], logprobs=[[-3.0]], sampled_token_ranks=[3]),
    ]


def test_requests_that_sampled_nothing_have_no_row_of_logprobs() -> None:
    driver = Driver(max_num_batched_tokens=6)
    driver.add("a", [1], logprobs=1, ignore_eos=True)
    driver.add("b", PROMPT + PROMPT, logprobs=1)
    output = driver.scheduler.schedule()
    logprobs = LogprobsLists(logprob_token_ids=[[5, 51]], logprobs=[[-1.0, -1.1]], sampled_token_ranks=[3])
    results = SampledOutput(step_id=output.step_id, req_ids=["b", "a"], sampled_token_ids=[[], [5]], logprobs=logprobs)

    [a] = driver.scheduler.update_from_output(output, results)

    assert (a.req_id, a.new_logprobs) == ("a", logprobs)


def test_an_error_ends_its_request_and_no_other() -> None:
    driver = Driver()
    driver.add("good", PROMPT, max_tokens=6, ignore_eos=True)
    driver.add("bad", [2] * 5, max_tokens=6, ignore_eos=True)
    driver.turn()
    driver.step(failing=("bad",))
    good, bad = sorted(driver.deliver(), key=lambda output: output.req_id, reverse=True)

    assert (bad.finish_reason, bad.error, bad.new_token_ids) == (FinishReason.ERROR, "broken on purpose", [])
    assert (good.finish_reason, good.error) == (None, None)
    driver.drain()


def test_an_error_of_a_request_that_is_not_in_the_batch_is_taken_too() -> None:
    driver = Driver()
    driver.add("a", PROMPT)
    driver.add("b", PROMPT[1:])
    output = driver.scheduler.schedule()
    results = SampledOutput(
        step_id=output.step_id, req_ids=["b"], sampled_token_ids=[[5]], errors={"a": "no slot for it"}
    )

    outputs = driver.scheduler.update_from_output(output, results)

    assert [(new.req_id, new.finish_reason, new.error) for new in outputs] == [
        ("b", None, None),
        ("a", FinishReason.ERROR, "no slot for it"),
    ]


def test_blocks_of_a_step_that_failed_are_shared_with_no_request() -> None:
    driver = Driver()
    driver.add("bad", [1] * 12, max_tokens=4)
    driver.step(failing=("bad",))
    driver.deliver()
    driver.add("good", [1] * 12, max_tokens=4, ignore_eos=True)

    assert driver.step().scheduled_new_reqs[0].num_computed_tokens == 0
    driver.drain()


@pytest.mark.parametrize(("sampled", "text"), [([], "0 tokens in step 0 instead of 1"), ([1, 2], "2 tokens")])
def test_a_wrong_number_of_tokens_ends_the_request_with_an_error(sampled: list[int], text: str) -> None:
    driver = Driver()
    driver.add("r", PROMPT)
    output = driver.scheduler.schedule()
    results = SampledOutput(step_id=output.step_id, req_ids=["r"], sampled_token_ids=[sampled])

    [new] = driver.scheduler.update_from_output(output, results)

    assert new.finish_reason is FinishReason.ERROR
    assert new.error is not None
    assert text in new.error


def test_a_request_that_results_leave_out_ends_with_an_error() -> None:
    driver = Driver()
    driver.add("r", PROMPT)
    output = driver.scheduler.schedule()

    [new] = driver.scheduler.update_from_output(output, SampledOutput(step_id=output.step_id))

    assert new.finish_reason is FinishReason.ERROR
    assert not driver.scheduler.has_unfinished_requests()


def test_results_of_another_step_are_refused() -> None:
    driver = Driver(depth=3)
    driver.add("r", PROMPT, max_tokens=9, ignore_eos=True)
    first, second = driver.step(), driver.step()
    results = driver.in_flight[0][1]

    with pytest.raises(LifecycleError, match=r"step 0 \(requests r\) were handed in as those of step 1 \(requests r\)"):
        driver.scheduler.update_from_output(second, results)
    with pytest.raises(LifecycleError, match=r"step 1 \(requests r\) came out of turn: those of step 0 \(requests r\)"):
        driver.scheduler.update_from_output(second, driver.in_flight[1][1])
    driver.deliver()
    with pytest.raises(LifecycleError, match=r"step 0 \(requests r\) came out of turn: those of step 1 \(requests r\)"):
        driver.scheduler.update_from_output(first, results)
    driver.deliver()
    with pytest.raises(LifecycleError, match="no results are due"):
        driver.scheduler.update_from_output(first, results)


def test_results_out_of_turn_name_a_few_requests_and_count_the_others() -> None:
    driver = Driver(depth=4, max_num_seqs=7, max_num_batched_tokens=64)
    driver.add("first", PROMPT, max_tokens=9, ignore_eos=True)
    driver.step()
    for number in range(6):
        driver.add(f"r{number}", [number + 1], max_tokens=9, ignore_eos=True)
    mixed, repeated = driver.step(), driver.step()

    message = "The results of step 2 (requests first, r0, r1, r2, r3 and 2 more) came out of turn: those of step 0"
    with pytest.raises(LifecycleError, match=re.escape(message + " (requests first) are due.")):
        driver.scheduler.update_from_output(repeated, driver.in_flight[2][1])
    driver.deliver()
    driver.deliver()
    message = "The results of step 1 (requests first, r0, r1, r2, r3 and 2 more) came out of turn: those of step 2"
    with pytest.raises(LifecycleError, match=re.escape(message)):
        driver.scheduler.update_from_output(mixed, SampledOutput(step_id=1))
    with pytest.raises(LifecycleError, match=re.escape("The results of step 7 (no requests) were handed in")):
        driver.scheduler.update_from_output(repeated, SampledOutput(step_id=7))


def test_results_that_name_a_stranger_are_refused() -> None:
    driver = Driver()
    driver.add("r", PROMPT)
    output = driver.scheduler.schedule()
    results = msgspec.structs.replace(answer(output, 5), req_ids=["stranger"])

    with pytest.raises(LifecycleError, match="'stranger'"):
        driver.scheduler.update_from_output(output, results)


def test_results_of_a_step_without_tokens_bring_nothing() -> None:
    driver = Driver(cache_config(9))
    output = driver.scheduler.schedule()

    assert driver.scheduler.update_from_output(output, SampledOutput(step_id=output.step_id)) == []


def test_the_oracle_of_these_tests_stops_for_each_reason() -> None:
    tokens, reason = undisturbed(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True), None, 64)
    assert (len(tokens), reason) == (3, FinishReason.LENGTH)
    stopped, reason = undisturbed(PROMPT, SamplingParams(max_tokens=60, stop_token_ids=(tokens[1],)), None, 64)
    assert (stopped, reason) == (tokens[:2], FinishReason.STOP)


@pytest.mark.parametrize("when", ["running", "preempted"])
@pytest.mark.parametrize("is_finite", [True, False])
def test_blocks_of_a_request_whose_logits_were_not_finite_are_not_shared(is_finite: bool, when: str) -> None:
    """Its prefix-cache hits are evicted too; blocks of a request that fails otherwise stay."""
    prompt = [token % 9 + 1 for token in range(14)]
    driver = Driver(max_num_batched_tokens=4, max_num_seqs=2)
    driver.add("before", prompt[:6], max_tokens=1, ignore_eos=True)
    driver.drain()
    driver.add("bad", prompt)
    for _ in range(2):
        driver.step()
        driver.deliver()
    output = driver.scheduler.schedule()
    if when == "preempted":
        driver.scheduler.preempt_all()
    fields = {"errors": {"bad": "broken"}, "not_finite_req_ids": [] if is_finite else ["bad"]}
    driver.scheduler.update_from_output(output, answer(output, **fields))
    driver.scheduler.kv_cache.check_integrity()
    driver.add("after", prompt)
    [request] = driver.scheduler.schedule().scheduled_new_reqs
    assert request.num_computed_tokens == (12 if is_finite else 0)


def test_other_texts_stay_shared_when_a_request_with_nan_fails() -> None:
    driver = Driver(max_num_seqs=2)
    driver.add("other", [7] * 9, max_tokens=1, ignore_eos=True)
    driver.drain()
    driver.add("bad", PROMPT)
    output = driver.scheduler.schedule()
    driver.scheduler.update_from_output(output, answer(output, errors={"bad": "nan"}, not_finite_req_ids=["bad"]))
    driver.add("after", [7] * 9)
    assert driver.scheduler.schedule().scheduled_new_reqs[0].num_computed_tokens == 8


@pytest.mark.parametrize("is_aborted", [False, True])
def test_steps_clear_blocks_from_the_first_nan_on_and_no_longer_in_workers_that_replace_those(is_aborted: bool) -> None:
    driver = Driver(max_num_seqs=2)
    driver.add("bad", PROMPT)
    output = driver.scheduler.schedule()
    if is_aborted:
        driver.scheduler.finish_requests(["bad"])
    nan = answer(output, errors={"bad": "nan"}, not_finite_req_ids=["bad"])
    assert not output.clears_blocks
    driver.scheduler.update_from_output(output, nan)
    driver.add("after", [7] * 9, max_tokens=8, ignore_eos=True)
    for _ in range(3):
        output = driver.scheduler.schedule()
        driver.scheduler.update_from_output(output, answer(output, 5))
        assert output.clears_blocks
    assert output.repeats_step_id is not None
    driver.scheduler.reset_for_recovery()
    assert not driver.scheduler.schedule().clears_blocks
