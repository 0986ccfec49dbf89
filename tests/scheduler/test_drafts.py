"""Steps that verify drafts: several tokens of a request at once, or fewer than were scheduled."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver
from scheduler_fakes import EOS, cache_config, fingerprints, full_spec, guess, next_token, window_spec

from penstock.contract import LogprobsLists, SampledOutput, SchedulerOutput
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason

PROMPT = [1, 2, 3, 4, 5]


def prefilled(driver: Driver, **params: object) -> None:
    """Add "r" and give it the token 6."""
    driver.add("r", PROMPT, **{"ignore_eos": True, **params})
    output = driver.scheduler.schedule()
    driver.scheduler.update_from_output(output, answer(output, 6))


def answer(output: SchedulerOutput, *token_ids: int, logprobs: LogprobsLists | None = None) -> SampledOutput:
    """Results in which "r" sampled these tokens."""
    return SampledOutput(step_id=output.step_id, req_ids=["r"], sampled_token_ids=[list(token_ids)], logprobs=logprobs)


def verify(driver: Driver, drafts: list[int], *token_ids: int, **fields: LogprobsLists) -> list[EngineCoreOutput]:
    """Run one step in which "r" has these drafts and samples these tokens."""
    driver.scheduler.update_draft_token_ids({"r": drafts})
    output = driver.scheduler.schedule()
    assert output.scheduled_spec_decode_tokens == {"r": drafts}
    assert output.num_scheduled_tokens == {"r": 1 + len(drafts)}
    return driver.scheduler.update_from_output(output, answer(output, *token_ids, **fields))


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_accepted_drafts_are_tokens_and_rejected_ones_are_taken_back(num_accepted: int) -> None:
    driver = Driver()
    prefilled(driver)
    request = driver.requests["r"]
    tokens = [*[7, 8][:num_accepted], 9]

    [output] = verify(driver, [7, 8], *tokens)

    assert (output.new_token_ids, output.finish_reason) == (tokens, None)
    assert request.all_token_ids == [*PROMPT, 6, *tokens]
    assert request.num_computed_tokens == request.num_tokens - 1
    assert (request.num_output_placeholders, request.spec_token_ids) == (0, [])
    following = driver.scheduler.schedule()
    assert following.num_scheduled_tokens == {"r": 1}
    assert following.scheduled_cached_reqs.num_computed_tokens == [6 + num_accepted]


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_as_many_tokens_as_were_asked_for_are_taken(num_tokens: int) -> None:
    driver = Driver()
    prefilled(driver)

    [output] = verify(driver, [7, 8], *range(7, 7 + num_tokens))

    assert output.finish_reason is FinishReason.ERROR
    assert output.error == f"The worker sampled {num_tokens} tokens in step 1 instead of 1 to 3."


def test_what_follows_a_stop_within_the_list_is_dropped() -> None:
    driver = Driver()
    prefilled(driver, stop_token_ids=(8,), logprobs=0)
    logprobs = LogprobsLists(
        logprob_token_ids=[[7], [8], [9]], logprobs=[[-1.0], [-2.0], [-3.0]], sampled_token_ranks=[1, 2, 3]
    )

    [output] = verify(driver, [7, 8], 7, 8, 9, logprobs=logprobs)

    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([7, 8], FinishReason.STOP, 8)
    assert output.new_logprobs == LogprobsLists(
        logprob_token_ids=[[7], [8]], logprobs=[[-1.0], [-2.0]], sampled_token_ranks=[1, 2]
    )
    assert driver.requests["r"].all_token_ids == [*PROMPT, 6, 7, 8]


def test_an_end_before_min_tokens_within_the_list_is_none() -> None:
    driver = Driver()
    prefilled(driver, min_tokens=3, ignore_eos=False)

    [output] = verify(driver, [EOS, 7], EOS, 7, EOS)

    # The second token of the output is none yet; the fourth is.
    assert (output.new_token_ids, output.finish_reason) == ([EOS, 7, EOS], FinishReason.STOP)


def test_a_step_has_no_more_drafts_than_tokens_are_left() -> None:
    driver = Driver()
    prefilled(driver, max_tokens=3)
    driver.scheduler.update_draft_token_ids({"r": [7, 8, 9]})

    output = driver.scheduler.schedule()

    assert output.scheduled_spec_decode_tokens == {"r": [7]}
    [end] = driver.scheduler.update_from_output(output, answer(output, 7, 8))
    assert (end.new_token_ids, end.finish_reason) == ([7, 8], FinishReason.LENGTH)


def test_the_last_token_has_no_drafts() -> None:
    driver = Driver()
    prefilled(driver, max_tokens=2)
    driver.scheduler.update_draft_token_ids({"r": [7]})

    output = driver.scheduler.schedule()

    assert (output.scheduled_spec_decode_tokens, output.num_scheduled_tokens) == ({}, {"r": 1})


def test_drafts_are_cut_to_the_budget_of_tokens() -> None:
    driver = Driver(max_num_batched_tokens=6)
    prefilled(driver)
    driver.add("s", PROMPT, ignore_eos=True)
    driver.scheduler.update_draft_token_ids({"r": [7, 8, 9, 1, 2, 3, 4], "s": [1], "unknown": [1]})

    output = driver.scheduler.schedule()

    assert output.scheduled_spec_decode_tokens == {"r": [7, 8, 9, 1, 2]}
    assert driver.requests["r"].spec_token_ids == []


def test_drafts_get_blocks_that_stay_when_they_are_rejected() -> None:
    driver = Driver()
    prefilled(driver)
    held = driver.scheduler.kv_cache.get_block_ids("r")
    assert held == ([1, 2],)

    verify(driver, [7, 8, 9], 1)

    # Positions 5 to 8 were computed, of which 6 to 8 are computed again.
    assert driver.scheduler.kv_cache.get_block_ids("r") == ([1, 2, 3],)
    driver.scheduler.update_draft_token_ids({"r": [7, 8]})
    output = driver.scheduler.schedule()
    assert output.scheduled_cached_reqs.new_block_ids == []


def test_no_request_finds_a_block_with_a_rejected_draft() -> None:
    driver = Driver(max_num_batched_tokens=32)
    prefilled(driver)
    verify(driver, [7, 8, 9], 7, 1)
    assert driver.requests["r"].all_token_ids == [*PROMPT, 6, 7, 1]

    # The second block was full, but its last position holds the key of a draft.
    driver.add("s", [*PROMPT, 6, 7, 8, 9], max_tokens=1)
    driver.add("t", [*PROMPT, 6, 7, 1, 9], max_tokens=1)
    computed = {new.req_id: new.num_computed_tokens for new in driver.scheduler.schedule().scheduled_new_reqs}
    assert computed == {"s": 4, "t": 4}


def test_an_asynchronous_request_is_ahead_by_all_of_its_drafts_until_results_say_otherwise() -> None:
    driver = Driver(depth=2)
    prefilled(driver)
    request = driver.requests["r"]
    outputs = []
    for _ in range(2):
        driver.scheduler.update_draft_token_ids({"r": [-1, -1]})
        outputs.append(driver.scheduler.schedule())

    assert [output.scheduled_cached_reqs.num_computed_tokens for output in outputs] == [[5], [8]]
    assert (request.num_computed_tokens, request.num_output_placeholders) == (11, 6)
    driver.scheduler.update_from_output(outputs[0], answer(outputs[0], 7))
    assert (request.num_tokens, request.num_computed_tokens, request.num_output_placeholders) == (7, 9, 3)
    driver.scheduler.update_from_output(outputs[1], answer(outputs[1], 8, 9))
    assert (request.num_tokens, request.num_computed_tokens, request.num_output_placeholders) == (9, 8, 0)


def test_a_request_that_may_have_reached_its_length_waits_to_know() -> None:
    driver = Driver(depth=2)
    prefilled(driver, max_tokens=4)
    driver.scheduler.update_draft_token_ids({"r": [-1, -1]})
    output = driver.scheduler.schedule()

    assert driver.scheduler.schedule().num_scheduled_tokens == {}
    driver.scheduler.update_from_output(output, answer(output, 7))
    assert driver.scheduler.schedule().num_scheduled_tokens == {"r": 1}


def test_a_step_with_drafts_is_repeated_by_none_and_repeats_none() -> None:
    driver = Driver(depth=2)
    prefilled(driver)
    steps = []
    for drafts in ([], [], [-1], [], [], []):
        driver.scheduler.update_draft_token_ids({"r": drafts})
        output = driver.scheduler.schedule()
        steps.append(output.repeats_step_id)
        driver.scheduler.update_from_output(output, answer(output, 7))

    # A step repeats the one before from the second decode in a row on.
    assert steps == [None, 1, None, None, 4, 5]


def test_no_step_is_repeated_while_drafts_are_in_flight() -> None:
    driver = Driver(depth=3)
    prefilled(driver)
    driver.scheduler.update_draft_token_ids({"r": [-1]})
    drafted, second, third = (driver.scheduler.schedule() for _ in range(3))
    driver.scheduler.update_from_output(drafted, answer(drafted, 7))
    fourth, fifth = (driver.scheduler.schedule() for _ in range(2))

    steps = [second, third, fourth, fifth]
    assert [step.num_scheduled_tokens for step in steps] == [{"r": 1}] * 4
    # What the request has computed is not known before, nor when it needs its next block.
    assert [step.repeats_step_id for step in steps] == [None, None, None, fourth.step_id]


def test_a_window_keeps_what_a_rejection_brings_back() -> None:
    driver = Driver(cache_config(20, window_spec(3)), depth=2)
    prefilled(driver)
    driver.scheduler.update_draft_token_ids({"r": [-1] * 5})
    first = driver.scheduler.schedule()
    driver.scheduler.update_draft_token_ids({"r": [-1] * 5})
    driver.scheduler.schedule()

    # It is ahead at position 11, but may come back to 6, which reads positions 4 to 6.
    assert driver.scheduler.kv_cache.get_block_ids("r")[0][1] != 0
    driver.scheduler.update_from_output(first, answer(first, 7))


def test_a_preempted_request_loses_its_drafts() -> None:
    driver = Driver(cache_config(20, full_spec()))
    prefilled(driver)
    driver.scheduler.update_draft_token_ids({"r": [7, 8]})

    driver.scheduler.preempt_all()

    assert driver.requests["r"].spec_token_ids == []
    driver.scheduler.update_draft_token_ids({"r": [7, 8]})
    assert driver.scheduler.schedule().scheduled_spec_decode_tokens == {}


@pytest.mark.parametrize("prompt_chunk", [16, 4])
def test_ahead_every_step_after_one_that_samples_verifies_what_the_device_drafted(prompt_chunk: int) -> None:
    driver = Driver(depth=2, num_speculative_tokens=2, max_num_batched_tokens=prompt_chunk)
    driver.add("r", PROMPT, max_tokens=20, ignore_eos=True)
    steps = [driver.scheduler.schedule() for _ in range(4)]

    # The last token of the prompt is no token that the device had drafted after, though it runs alone.
    chunks = [{}] if prompt_chunk == 16 else [{}, {}]
    drafted = [step.scheduled_spec_decode_tokens for step in steps]
    assert drafted == chunks + [{"r": [-1, -1]}] * (4 - len(chunks))
    assert [step.num_scheduled_tokens["r"] for step in steps[len(chunks) :]] == [3] * (4 - len(chunks))


def test_placeholders_end_where_lengths_and_the_budget_do() -> None:
    driver = Driver(depth=2, num_speculative_tokens=3, max_num_batched_tokens=7, max_model_len=12)
    driver.add("short", [1], max_tokens=4, ignore_eos=True)
    driver.add("long", PROMPT, ignore_eos=True)
    first, second = driver.scheduler.schedule(), driver.scheduler.schedule()

    assert first.num_scheduled_tokens == {"short": 1, "long": 5}
    # Of four tokens, the first is on its way, and the last is sampled after the drafts.
    assert second.scheduled_spec_decode_tokens == {"short": [-1] * 2, "long": [-1] * 3}
    third = driver.scheduler.schedule()
    # One may have all of its tokens; the other has two left below the longest context: one draft, and one after it.
    assert third.scheduled_spec_decode_tokens == {"long": [-1]}

    tight = Driver(depth=2, num_speculative_tokens=3, max_num_batched_tokens=6)
    tight.add("a", [1], max_tokens=30, ignore_eos=True)
    tight.add("b", PROMPT, max_tokens=30, ignore_eos=True)
    tight.scheduler.schedule()
    cut = tight.scheduler.schedule()
    assert cut.scheduled_spec_decode_tokens == {"a": [-1] * 3, "b": [-1]}
    # What found no room is drafted anew.
    assert tight.scheduler.schedule().scheduled_spec_decode_tokens == {"a": [-1] * 3, "b": [-1]}


def test_one_step_at_a_time_verifies_only_drafts_that_are_named() -> None:
    driver = Driver(num_speculative_tokens=2)
    prefilled(driver)
    steps = []
    for drafts in ([], [7, 8], [], []):
        driver.scheduler.update_draft_token_ids({"r": drafts})
        output = driver.scheduler.schedule()
        steps.append((output.scheduled_spec_decode_tokens, output.repeats_step_id is None))
        driver.scheduler.update_from_output(output, answer(output, 9))

    assert [drafts for drafts, _ in steps] == [{}, {"r": [7, 8]}, {}, {}]
    assert steps[-1][1] is False


def test_a_request_that_begins_anew_has_no_drafts_until_it_samples() -> None:
    driver = Driver(depth=2, num_speculative_tokens=2)
    driver.add("r", PROMPT, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        driver.turn()
    driver.scheduler.preempt_all()
    while driver.in_flight:
        driver.deliver()

    again, following = driver.step(), driver.step()
    assert [new.req_id for new in again.scheduled_new_reqs] == ["r"]
    assert (again.scheduled_spec_decode_tokens, following.scheduled_spec_decode_tokens) == ({}, {"r": [-1, -1]})
    driver.drain()


@pytest.mark.parametrize("depth", [2, 3])
def test_drafts_of_the_device_save_steps(depth: int) -> None:
    driver = Driver(depth=depth, num_speculative_tokens=3, max_model_len=60)
    driver.add("r", PROMPT, max_tokens=50, ignore_eos=True)
    driver.drain()

    assert len(driver.tokens["r"]) == 50
    assert sum(step.total_num_scheduled_tokens > 0 for step in driver.steps) < 35


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_save_steps(depth: int) -> None:
    driver = Driver(depth=depth, max_drafts=5)
    driver.add("r", PROMPT, max_tokens=40, ignore_eos=True)
    driver.drain()

    assert len(driver.tokens["r"]) == 40
    assert sum(step.total_num_scheduled_tokens > 0 for step in driver.steps) < 30


def test_the_fake_speculator_is_right_most_of_the_time_and_wrong_at_times() -> None:
    driver = Driver()
    drafts = [guess(PROMPT, None, 1, driver.rng)[0] for _ in range(200)]
    right = next_token(fingerprints(PROMPT, None)[-1])
    assert 100 < drafts.count(right) < 195
