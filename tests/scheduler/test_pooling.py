"""Requests that end with a vector instead of tokens."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver
from scheduler_fakes import pooled_vector

from penstock.contract import ArrayBytes, PooledOutput, SampledOutput
from penstock.errors import ContextTooLong
from penstock.scheduler.outputs import FinishReason

PROMPT = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_ends_with_its_vector_when_its_prompt_is_done(depth: int) -> None:
    driver = Driver(depth=depth, max_num_batched_tokens=3, pools=True)
    request = driver.add("r", PROMPT, max_tokens=5)
    driver.drain()

    end = driver.ends["r"]
    assert (end.finish_reason, end.new_token_ids, end.pooled) == (
        FinishReason.STOP,
        [],
        pooled_vector(PROMPT, None),
    )
    assert end.first_scheduled_time is not None
    assert (request.num_output_placeholders, request.all_token_ids) == (0, PROMPT)
    assert [step.total_num_scheduled_tokens for step in driver.steps if step.num_scheduled_tokens] == [3, 3, 1]


def test_its_prompt_may_fill_the_context() -> None:
    driver = Driver(max_model_len=16, pools=True)
    driver.add("r", [1] * 16)
    driver.drain()
    with pytest.raises(ContextTooLong, match=r"context of 16\. Shorten the prompt to 16 tokens"):
        driver.add("s", [1] * 17)


def test_it_takes_all_of_its_prompt_whatever_is_cached() -> None:
    driver = Driver(pools=True)
    for name in ("a", "b"):
        driver.add(name, PROMPT)
        driver.drain()

    assert driver.ends["b"].num_cached_tokens == 0


def test_drafts_are_none_of_its_business() -> None:
    driver = Driver(pools=True, max_num_batched_tokens=4)
    request = driver.add("r", PROMPT)
    driver.turn()
    driver.scheduler.update_draft_token_ids({"r": [1, 2]})

    assert request.spec_token_ids == []
    assert driver.turn().num_scheduled_tokens == {"r": 3}
    driver.drain()


@pytest.mark.parametrize("pooled", [None, ArrayBytes.of([0.5])])
def test_a_vector_comes_with_the_end_of_the_prompt_and_not_before(pooled: ArrayBytes | None) -> None:
    driver = Driver(pools=True, max_num_batched_tokens=7 if pooled is None else 3)
    driver.add("r", PROMPT)
    output = driver.scheduler.schedule()

    [end] = driver.scheduler.update_from_output(
        output, PooledOutput(step_id=output.step_id, req_ids=["r"], pooled=[pooled])
    )

    assert end.error == f"The worker pooled {'nothing' if pooled is None else 'too early'} in step 0."


def test_tokens_are_no_results_of_a_request_that_pools() -> None:
    driver = Driver(pools=True)
    driver.add("r", PROMPT)
    output = driver.scheduler.schedule()

    [end] = driver.scheduler.update_from_output(
        output, SampledOutput(step_id=output.step_id, req_ids=["r"], sampled_token_ids=[[]])
    )

    assert end.error == "The worker pooled nothing in step 0, but sampled."


def test_a_vector_is_no_result_of_a_request_that_generates() -> None:
    driver = Driver()
    driver.add("r", PROMPT)
    output = driver.scheduler.schedule()

    [end] = driver.scheduler.update_from_output(
        output, PooledOutput(step_id=output.step_id, req_ids=["r"], pooled=[ArrayBytes.of([0.5])])
    )

    assert end.error == "The worker sampled nothing in step 0, but pooled."
