"""Requests that come with tokens generated before, as from an engine that died."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver
from scheduler_fakes import EOS, undisturbed
from test_scheduler_results import sample

from penstock.contract import SamplingParams
from penstock.errors import InvalidRequest
from penstock.scheduler.outputs import FinishReason

PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_resumed", [1, 4, 7])
def test_the_rest_of_its_tokens_are_those_of_an_undisturbed_run(num_resumed: int, depth: int) -> None:
    tokens, _ = undisturbed(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True), None, 64)
    driver = Driver(depth=depth)
    driver.add("r", PROMPT, max_tokens=8, ignore_eos=True, output_token_ids=tokens[:num_resumed])

    [new] = driver.turn().scheduled_new_reqs

    assert (new.prompt_token_ids, new.prefill_token_ids) == (PROMPT, PROMPT + tokens[:num_resumed])
    driver.drain()
    assert driver.tokens["r"] == tokens


def test_its_generated_tokens_count_towards_min_tokens() -> None:
    driver = Driver()
    driver.add("r", PROMPT, min_tokens=3, output_token_ids=[5])
    assert sample(driver, EOS)[0].finish_reason is None
    assert sample(driver, EOS)[0].finish_reason is FinishReason.STOP


def test_its_generated_tokens_count_towards_its_length() -> None:
    driver = Driver()
    driver.add("r", PROMPT, max_tokens=3, ignore_eos=True, output_token_ids=[5])
    assert [sample(driver, 6)[0].finish_reason for _ in range(2)] == [None, FinishReason.LENGTH]


def test_the_log_probabilities_of_its_prompt_were_told_before() -> None:
    driver = Driver()
    driver.add("other", [*PROMPT, 5, 6, 7, 8], max_tokens=1)
    driver.drain()
    driver.add("r", PROMPT, prompt_logprobs=1, max_tokens=9, ignore_eos=True, output_token_ids=[5, 6, 7, 8])

    # It takes what is cached, and has none to tell.
    assert driver.scheduler.schedule().scheduled_new_reqs[0].num_computed_tokens == 8
    assert driver.requests["r"].prompt_logprobs is None


def test_what_has_ended_is_not_resumed() -> None:
    driver = Driver()
    with pytest.raises(InvalidRequest, match="'r' comes with 3 generated tokens, but ends at 3"):
        driver.add("r", PROMPT, max_tokens=3, output_token_ids=[5, 6, 7])
    assert not driver.scheduler.has_work()
