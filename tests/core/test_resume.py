"""A request that brings tokens of a core that is gone goes on behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.contract import SamplingParams
from penstock.scheduler.outputs import FinishReason
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import Result, add, finish, make_core, random_prompts, run

PROMPTS = random_prompts((5, 21, 40), VOCAB_SIZE, seed=4)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True, presence_penalty=0.5, min_tokens=6, logprobs=2
    )


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_known", [1, 7, 11])
@pytest.mark.each_value_quick
def test_the_rest_is_what_an_undisturbed_core_generates(tmp_path: Path, async_scheduling: bool, num_known: int) -> None:
    tiny_checkpoint(tmp_path)
    options = {"async_scheduling": async_scheduling, "max_num_batched_tokens": 256}
    core = make_core(tmp_path, **options)
    whole = run(core, PROMPTS, [sampled(seed) for seed in range(3)])
    core.close()
    core = make_core(tmp_path, **options)
    for index, prompt in enumerate(PROMPTS):
        known = whole[index].tokens[: num_known if index else 0]
        add(core, f"r{index}", prompt, sampled(index), output_token_ids=known)
    results: dict[str, Result] = {}
    finish(core, results)
    core.close()
    for index, expected in enumerate(whole):
        start = num_known if index else 0
        result = results[f"r{index}"]
        assert result.tokens == expected.tokens[start:]
        assert result.finish_reason is FinishReason.LENGTH
        for found, row in zip(result.logprobs, expected.logprobs[start:], strict=True):
            assert found == pytest.approx(row, abs=1e-5)
