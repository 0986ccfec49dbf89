"""Requests whose results must be equal for every arrangement of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.contract import SamplingParams
from penstock.engine.core.engine_core import EngineCore
from support.engines import Result, add, greedy, random_prompts, run

# A multiple of no number of workers.
VOCAB_SIZE = 97
# Several chunks of one prompt, a prompt that begins as another does, and short ones.
PROMPTS = random_prompts((5, 21, 40, 90), VOCAB_SIZE, seed=4)
PROMPTS += [[*PROMPTS[2], 7, 8], PROMPTS[1][:16]]


def sampled(seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=16, ignore_eos=True, **fields)


PARAMS = [
    greedy(16, logprobs=3),
    sampled(1, top_k=20, logprobs=2),
    sampled(2, top_p=0.8, presence_penalty=0.5, prompt_logprobs=2),
    greedy(16),
    sampled(3, min_p=0.05, frequency_penalty=0.3, logit_bias={5: 2.0}),
    greedy(16, repetition_penalty=1.2, prompt_logprobs=1),
]


def results_of(core: EngineCore, *, is_tight: bool = True) -> list[Result]:
    """Run all requests twice, the second time with cached prefixes, and close the core.

    is_tight: the KV cache is too small for all requests, so some must have been preempted.
    """
    try:
        first = run(core, PROMPTS, PARAMS)
        again = run(core, PROMPTS, PARAMS)
    finally:
        core.close()
    if is_tight:
        assert sum(result.num_preemptions for result in first) > 0
    assert sum(result.num_cached_tokens for result in again) > 0
    return first + again


def some_steps(
    core: EngineCore, prompts: Sequence[list[int]] = PROMPTS, params: Sequence[SamplingParams] = PARAMS
) -> dict[str, Result]:
    """Start all requests, `r0`, `r1` and so on, and run some steps."""
    for index, (prompt, of_request) in enumerate(zip(prompts, params, strict=True)):
        add(core, f"r{index}", prompt, of_request)
    results: dict[str, Result] = {}
    for _ in range(8):
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
    return results


def assert_same(found: Sequence[Result], expected: Sequence[Result], tolerance: float = 1e-4) -> None:
    """Compare results. tolerance: absolute, of log-probabilities."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.tokens, ours.finish_reason, ours.error) == (theirs.tokens, theirs.finish_reason, theirs.error)
        assert len(ours.logprobs) == len(theirs.logprobs)
        for row, other in zip(
            [*ours.logprobs, *(ours.prompt_logprobs or [])],
            [*theirs.logprobs, *(theirs.prompt_logprobs or [])],
            strict=True,
        ):
            assert row == pytest.approx(other, abs=tolerance)
