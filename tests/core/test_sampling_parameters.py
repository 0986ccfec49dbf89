"""Sampling parameters in a whole engine: alone, batched, preempted, and beside failing requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.contract import SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.scheduler.outputs import FinishReason
from support import plain_sampling
from support.checkpoints import VOCAB_SIZE, oracle_logits, save_checkpoint, tiny_model
from support.engines import TOLERANCE, Result, greedy, make_core, random_prompts, run

NUM_TOKENS = 20
PROMPTS = random_prompts((5, 21, 1, 40, 13, 8, 30, 17, 3, 11, 26, 9), VOCAB_SIZE, seed=21)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True},
    {"max_num_batched_tokens": 7},
    {"async_scheduling": True, "max_num_batched_tokens": 17, "max_num_seqs": 5, "block_size": 5},
]
# Little more than one request of the longest length: two layers of 2 KV heads of 16 float32 values.
TIGHT = {"block_size": 4, "max_model_len": 64, "kv_cache_memory_bytes": 20 * 4 * 2 * 2 * 2 * 16 * 4}


def _random_params(rng: random.Random, temperature: float) -> SamplingParams:
    """Demanding parameters; those of greedy requests leave a choice, so that each stage shows."""
    tokens = range(3, VOCAB_SIZE)
    choose = rng.choice
    return SamplingParams(
        temperature=temperature,
        seed=rng.randrange(1 << 30),
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        top_k=choose([0, 5, 30]),
        top_p=choose([1.0, 0.9]),
        min_p=choose([0.0, 0.02]),
        repetition_penalty=choose([1.0, 1.3, 0.8]),
        frequency_penalty=choose([0.0, 0.9, -0.4]),
        presence_penalty=choose([0.0, 1.5]),
        logit_bias=choose([None, {token: rng.uniform(-4, 4) for token in rng.sample(tokens, 5)}]),
        allowed_token_ids=choose([None, rng.sample(tokens, 40)]),
        bad_words_token_ids=choose([(), [rng.sample(tokens, rng.randint(1, 2)) for _ in range(30)]]),
        min_tokens=choose([0, 6]),
        all_stop_token_ids=rng.sample(tokens, 3),
        logprobs=choose([None, 2, -1]),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("model")
    oracle = tiny_model("llama")
    save_checkpoint(oracle, folder)
    return oracle, folder


@pytest.fixture(scope="module", params=[0.0, 0.9], ids=["greedy", "drawn"])
def undisturbed(request: pytest.FixtureRequest, model: tuple[Any, Path]) -> list[tuple[SamplingParams, list[int]]]:
    """Demanding requests, each served alone, with their tokens."""
    rng = random.Random(7)
    params = [_random_params(rng, request.param) for _ in PROMPTS]
    core = make_core(model[1], fast_paths="auto", enable_prefix_caching=False)
    served = [(each, run(core, [prompt], each)[0].tokens) for prompt, each in zip(PROMPTS, params, strict=True)]
    core.close()
    return served


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.one_case_quick
def test_each_request_gets_what_it_gets_alone(
    model: tuple[Any, Path], undisturbed: list[tuple[SamplingParams, list[int]]], options: dict[str, Any]
) -> None:
    core = make_core(model[1], **options)
    results = run(core, PROMPTS, [params for params, _ in undisturbed])
    assert [result.tokens for result in results] == [tokens for _, tokens in undisturbed]
    core.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.each_value_quick
def test_preemption_changes_no_token(
    model: tuple[Any, Path], undisturbed: list[tuple[SamplingParams, list[int]]], async_scheduling: bool
) -> None:
    core = make_core(model[1], async_scheduling=async_scheduling, **TIGHT)
    results = run(core, PROMPTS, [params for params, _ in undisturbed])
    assert sum(result.num_preemptions for result in results) > 0
    assert [result.tokens for result in results] == [tokens for _, tokens in undisturbed]
    core.close()


def test_greedy_tokens_are_the_best_of_the_oracles_logits_after_masks_bias_and_penalties(
    model: tuple[Any, Path],
) -> None:
    oracle, folder = model
    rng = random.Random(3)
    params = [_random_params(rng, 0.0) for _ in PROMPTS]
    core = make_core(folder, async_scheduling=True)
    for prompt, each, result in zip(PROMPTS, params, run(core, PROMPTS, params), strict=True):
        rows = oracle_logits(oracle, [*prompt, *result.tokens])[len(prompt) - 1 : -1]
        for index, (row, token) in enumerate(zip(rows, result.tokens, strict=True)):
            values = plain_sampling.shaped(each, row.numpy(), prompt, result.tokens[:index])
            assert values.max() - values[token] <= 2 * TOLERANCE
    core.close()


def test_min_tokens_holds_the_end_back_and_no_longer(model: tuple[Any, Path]) -> None:
    core = make_core(model[1])
    best = run(core, [PROMPTS[0]], greedy(NUM_TOKENS))[0].tokens
    for held in (0, 1, 4):
        # Nearly every token would end the output, so it ends as soon as it may.
        params = SamplingParams(
            temperature=0,
            seed=0,
            max_tokens=NUM_TOKENS,
            min_tokens=held,
            stop_token_ids=list(range(3, VOCAB_SIZE - 5)),
        )
        result = run(core, [PROMPTS[0]], params)[0]
        first = next(index for index, token in enumerate(result.tokens) if token in params.stop_token_ids)
        assert first >= held
        assert len(result.tokens) == first + 1
        if held == 0:
            assert result.tokens == best[: len(result.tokens)]
    core.close()


def _poisoned(folder: Path, token: int, **options: Any) -> EngineCore:
    """An engine whose model has NaN in one token's embedding."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
    save_checkpoint(model, folder)
    return make_core(folder, async_scheduling=True, **options)


@pytest.mark.parametrize("max_num_batched_tokens", [64, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.each_value_quick
def test_nan_in_the_logits_ends_that_request_and_names_it(
    model: tuple[Any, Path], tmp_path: Path, temperature: float, max_num_batched_tokens: int
) -> None:
    bad = 77
    healthy = make_core(model[1])
    params = [
        SamplingParams(temperature=temperature, seed=index, max_tokens=12, ignore_eos=True, logit_bias={bad: -100.0})
        for index in range(4)
    ]
    prompts = [prompt for prompt in PROMPTS if bad not in prompt][:4]
    expected = [result.tokens for result in run(healthy, prompts, params)]
    healthy.close()
    core = _poisoned(tmp_path / "poisoned", bad, max_num_batched_tokens=max_num_batched_tokens, block_size=4)
    for _ in range(2):
        results = run(core, [*prompts, [5, bad, *range(6, 20)]], [*params, params[0]])
        assert results[4].num_cached_tokens == 0
        assert [result.tokens for result in results[:4]] == expected
        assert (results[4].finish_reason, results[4].tokens) == (FinishReason.ERROR, [])
        assert results[4].error is not None
        assert "NaN or infinite" in results[4].error
    core.close()


def test_blocks_before_the_nan_are_not_found_again(tmp_path: Path) -> None:
    """With a window, finite logits do not show that all blocks before them are finite."""
    bad = 77
    core = _poisoned(tmp_path, bad, max_num_batched_tokens=8, block_size=4)
    healthy, late = list(range(5, 21)), [*range(30, 46), bad, 5]
    for is_known in (False, True):
        results = run(core, [healthy, late], greedy(2))
        assert results[0].num_cached_tokens == (12 if is_known else 0)
        assert (results[1].finish_reason, results[1].num_cached_tokens) == (FinishReason.ERROR, 0)
    core.close()


def test_parameters_that_leave_no_token_end_that_request_and_say_so(model: tuple[Any, Path]) -> None:
    core = make_core(model[1])
    impossible = SamplingParams(temperature=0, seed=0, allowed_token_ids=[5], bad_words_token_ids=[[5, 5]])
    good, bad = run(core, [PROMPTS[0], PROMPTS[0]], [greedy(5), impossible])
    assert len(good.tokens) == 5
    assert (bad.finish_reason, bad.tokens) == (FinishReason.INVALID, [5])
    assert bad.error is not None
    assert "allowed_token_ids, bad_words" in bad.error
    core.close()


def test_all_logprobs_and_few_share_a_batch(model: tuple[Any, Path]) -> None:
    core = make_core(model[1])
    results: list[Result] = run(core, PROMPTS[:3], [greedy(4, logprobs=-1), greedy(4, logprobs=1), greedy(4)])
    assert [len(row) for row in results[0].logprobs] == [VOCAB_SIZE] * 4
    assert all(1 <= len(row) <= 2 for row in results[1].logprobs)
    assert results[2].logprobs == []
    core.close()
