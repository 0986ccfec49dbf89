"""Drawn tokens follow the exact distribution that the parameters describe."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.contract import SamplingParams
from support import plain_sampling
from support.plain_sampling import VOCAB_SIZE, HandDriven, random_logits

NUM_REQUESTS, NUM_ROUNDS = 1000, 40
NUM_DRAWS = NUM_REQUESTS * NUM_ROUNDS
PROMPT, OUTPUT = [1, 2, 3], [3, 4, 4, 5]
TRUNCATIONS: dict[str, Any] = {"temperature": 0.7, "top_k": 12, "top_p": 0.8, "min_p": 0.03}
ALONE_AND_COMBINED = [
    dict(subset) for size in range(len(TRUNCATIONS) + 1) for subset in itertools.combinations(TRUNCATIONS.items(), size)
]
SHAPED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"logit_bias": {7: 3.0, 8: -3.0}, "top_p": 0.9},
    {"allowed_token_ids": list(range(0, VOCAB_SIZE, 3)), "bad_words_token_ids": [[9], [4, 5, 12], [5, 15]]},
    {"min_tokens": 9, "stop_token_ids": [20, 21], "temperature": 1.8},
    {
        **TRUNCATIONS,
        "repetition_penalty": 1.4,
        "logit_bias": {7: 3.0},
        "bad_words_token_ids": [[7]],
        "temperature": 1.5,
    },
]


@pytest.mark.parametrize("fields", ALONE_AND_COMBINED + SHAPED, ids=str)
@pytest.mark.one_case_quick
def test_counts_pass_a_chi_squared_test(fields: dict[str, Any]) -> None:
    params = SamplingParams(seed=0, **fields)
    logits = random_logits(1, 5)
    driver = HandDriven(num_slots=NUM_REQUESTS)
    for slot in range(NUM_REQUESTS):
        driver.add(slot, params, PROMPT, OUTPUT)
    rows = driver.rows(range(NUM_REQUESTS))
    counts = np.zeros(VOCAB_SIZE)
    seeds = np.random.default_rng(7).integers(-(2**63), 2**63 - 1, NUM_DRAWS).tolist()
    for _ in range(NUM_ROUNDS):
        for slot in range(NUM_REQUESTS):
            driver.sampler._draw._seed.set(slot, seeds.pop())
        drawn = driver.sampler.sample(logits.expand(NUM_REQUESTS, -1).contiguous(), rows).sampled_token_ids
        counts += np.bincount(drawn.numpy(), minlength=VOCAB_SIZE)

    shaped = plain_sampling.shaped(params, logits[0].numpy(), PROMPT, OUTPUT)
    expected = plain_sampling.truncated(params, shaped) * NUM_DRAWS
    assert counts[expected == 0].sum() == 0, "a token was drawn that was cut off"
    assert _chi_squared(counts, expected) < 1


def _chi_squared(counts: np.ndarray, expected: np.ndarray) -> float:
    """The statistic as a share of what it exceeds by chance in less than one of a million tests."""
    counts, expected = counts[expected > 0], expected[expected > 0]
    order = expected.argsort()
    # Tokens too rare to count on their own are counted together.
    starts = np.unique(np.searchsorted(np.cumsum(expected[order]), np.arange(0, expected.sum(), 20.0)))
    seen, due = np.add.reduceat(counts[order], starts), np.add.reduceat(expected[order], starts)
    degrees = len(due) - 1
    if degrees == 0:
        return 0.0
    # Wilson and Hilferty, "The Distribution of Chi-Square", 1931, at 4.75 standard deviations.
    limit = degrees * (1 - 2 / (9 * degrees) + 4.75 * np.sqrt(2 / (9 * degrees))) ** 3
    return float(((seen - due) ** 2 / due).sum() / limit)


def test_the_chi_squared_test_notices_a_distribution_that_is_a_little_off() -> None:
    logits = random_logits(1, 5)[0].numpy()
    expected = plain_sampling.truncated(SamplingParams(), logits) * NUM_DRAWS
    wrong = plain_sampling.truncated(msgspec.structs.replace(SamplingParams(), temperature=1.05), logits) * NUM_DRAWS
    assert _chi_squared(wrong, expected) > 1
    assert _chi_squared(expected, expected) == 0
