"""Thinking budget against a reference that rereads the whole output at each token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract import SamplingParams
from penstock.runner.sampling.thinking_budget import ThinkingBudget
from support.plain_sampling import VOCAB_SIZE, HandDriven, random_logits

START, END = [7], [8]
LONG_START, LONG_END = [7, 9], [8, 9, 8, 10]
# What begins thinking, what ends it, and what else does.
MARKERS: list[tuple[list[int], list[int], list[list[int]]]] = [
    (START, END, []),
    (LONG_START, LONG_END, []),
    (START, LONG_END, [[11, 9], [10]]),
]


def params(
    budget: int,
    start: list[int] = START,
    end: list[int] = END,
    implied: list[list[int]] | None = None,
    *,
    starts: bool = False,
    **fields: Any,
) -> SamplingParams:
    argument: dict[str, Any] = {"budget": budget, "start_token_ids": start, "end_token_ids": end}
    if implied:
        argument["implied_end_token_ids"] = implied
    if starts:
        argument["starts_in_thinking"] = True
    return SamplingParams(**{"temperature": 0, "seed": 0, "extra_args": {"thinking_budget": argument}, **fields})


def forced_token(
    text: list[int],
    budget: int,
    start: list[int],
    end: list[int],
    implied: list[list[int]],
    starts_at: int | None = None,
) -> int | None:
    """The token that must follow, None if the model is free. starts_at: where thinking begins without a marker."""

    def after_last(marker: list[int]) -> int:
        ends = [n for n in range(len(marker), len(text) + 1) if text[n - len(marker) : n] == marker]
        return max(ends, default=-1)

    began, ended = after_last(start), max(after_last(marker) for marker in (end, *implied))
    if began <= ended and starts_at is not None and ended <= starts_at:
        began, ended = starts_at, -1
    if began <= ended or len(text) - began < budget:
        return None
    thought = text[began:]
    said = max((n for n in range(len(end)) if n == 0 or thought[-n:] == end[:n]), default=0)
    return end[said]


@settings(max_examples=80, deadline=None)
@given(
    budgets=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    kinds=st.lists(st.sampled_from(range(len(MARKERS))), min_size=5, max_size=5),
    starts=st.lists(st.booleans(), min_size=5, max_size=5),
    seed=st.integers(0, 10_000),
)
def test_forced_tokens_are_those_of_a_restatement(
    budgets: list[int], kinds: list[int], starts: list[bool], seed: int
) -> None:
    rng = random.Random(seed)
    driver = HandDriven()
    # Few different tokens, so that texts often begin and end thinking, or nearly so.
    texts = [rng.choices([7, 8, 9, 10, 11], k=rng.randint(1, 8)) for _ in budgets]
    prompt_lens = [len(text) for text in texts]
    markers = [MARKERS[kind] for kind in kinds]

    def add(slot: int) -> None:
        text, length = texts[slot], prompt_lens[slot]
        driver.add(slot, params(budgets[slot], *markers[slot], starts=starts[slot]), text[:length], text[length:])

    for slot in range(len(budgets)):
        add(slot)
    for _ in range(15):
        logits = random_logits(len(budgets), rng.randrange(10_000))
        wanted = [rng.choice([7, 8, 9, 10, 11]) for _ in budgets]
        logits[range(len(budgets)), wanted] = 50.0
        tokens = driver.step(range(len(budgets)), logits).sampled_token_ids.tolist()
        for slot, (text, token, free) in enumerate(zip(texts, tokens, wanted, strict=True)):
            starts_at = prompt_lens[slot] if starts[slot] else None
            forced = forced_token(text, budgets[slot], *markers[slot], starts_at)
            assert token == (free if forced is None else forced)
            text.append(token)
            if rng.random() < 0.1:
                driver.remove(slot)
                add(slot)


def test_the_end_is_said_although_other_parameters_forbid_it() -> None:
    driver = HandDriven()
    driver.add(0, params(1, logit_bias={8: -100.0}, temperature=0.5, top_k=3, allowed_token_ids=[20, 21]), [5, 7, 5])
    result = driver.step([0], random_logits(1, 0))
    assert result.sampled_token_ids.tolist() == END
    assert result.failures.tolist() == [0]


def test_requests_without_a_budget_are_left_alone() -> None:
    driver = HandDriven()
    driver.add(0, params(0), [7])
    driver.add(1, SamplingParams(temperature=0, seed=0), [7])
    logits = random_logits(2, 0)
    assert driver.step([1, 0], logits).sampled_token_ids.tolist() == [int(logits[0].argmax()), 8]


@pytest.mark.parametrize(
    "argument",
    [
        5,
        {"budget": 5},
        {"budget": -1, "start_token_ids": [1], "end_token_ids": [2]},
        {"budget": 1.5, "start_token_ids": [1], "end_token_ids": [2]},
        {"budget": 1, "start_token_ids": [], "end_token_ids": [2]},
        {"budget": 1, "start_token_ids": [1], "end_token_ids": ["x"]},
        {"budget": 1, "start_token_ids": [1], "end_token_ids": [2], "more": 1},
        {"budget": 1, "start_token_ids": [1], "end_token_ids": [2], "implied_end_token_ids": [3]},
        {"budget": 1, "start_token_ids": [1], "end_token_ids": [2], "implied_end_token_ids": 3},
        {"budget": 1, "start_token_ids": [1], "end_token_ids": [2], "starts_in_thinking": 1},
    ],
    ids=str,
)
def test_a_bad_argument_is_refused(argument: Any) -> None:
    with pytest.raises(ValueError, match="is not valid. Allowed: "):
        ThinkingBudget.validate(SamplingParams(extra_args={"thinking_budget": argument}))


def test_a_marker_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RuntimeError, match="'thinking_budget' failed in add_request.*vocabulary"):
        HandDriven().add(0, params(1, [VOCAB_SIZE]), [5])


def test_unfinished_prefills_do_not_change_what_the_prompt_says() -> None:
    driver = HandDriven()
    driver.add(0, params(2), [7, 5, 5, 5])
    driver.lengths[0] = 1
    logits = torch.zeros(1, VOCAB_SIZE)
    for length in (1, 3):
        driver.lengths[0] = length
        driver.step([0], logits, num_sampled=[0])
    driver.lengths[0] = 4
    assert driver.step([0], logits).sampled_token_ids.tolist() == END
