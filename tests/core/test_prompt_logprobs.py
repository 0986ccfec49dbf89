"""Log-probabilities of prompts equal Transformers' in float32, however the prompt is cut and whatever happens to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.attention import ForwardContext
from penstock.contract import RpcCall, SchedulerOutput
from penstock.runner.sampling import prompt_logprobs
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE, oracle_logits, save_checkpoint, tiny_model
from support.engines import TOLERANCE, Result, assert_greedy_continuation, greedy, make_core, random_prompts, run

PROMPTS = random_prompts((1, 2, 40, 17, 16, 33, 8, 55), VOCAB_SIZE, seed=31)
# Requests with and without, and of different widths, share the steps.
PARAMS = [
    greedy(6, prompt_logprobs=0),
    greedy(6, prompt_logprobs=-1),
    greedy(6, prompt_logprobs=3, logprobs=1),
    greedy(6),
    greedy(6, prompt_logprobs=-1, logprobs=-1),
    greedy(6, prompt_logprobs=1),
    greedy(6, logprobs=2),
    greedy(6, prompt_logprobs=2),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"max_num_batched_tokens": 1024},
    "chunked": {"max_num_batched_tokens": 13},
    "asynchronous": {"async_scheduling": True},
    "asynchronous, chunked": {"async_scheduling": True, "max_num_batched_tokens": 9, "block_size": 3},
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("model")
    oracle = tiny_model(request.param, head_dim=16)
    save_checkpoint(oracle, folder)
    return oracle, folder


def assert_equals_oracle(oracle: Any, prompt: list[int], params: SamplingParams, result: Result) -> None:
    assert_greedy_continuation(oracle, prompt, result)
    asked = params.prompt_logprobs
    if asked is None:
        assert result.prompt_logprobs is None
        return
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(prompt) - 1
    num_likeliest = VOCAB_SIZE if asked == -1 else asked
    expected = torch.log_softmax(oracle_logits(oracle, prompt), dim=-1)
    for row, target, found in zip(expected, prompt[1:], result.prompt_logprobs, strict=False):
        assert next(iter(found)) == target
        for token, value in found.items():
            assert abs(float(row[token]) - value) <= TOLERANCE
        likeliest = sorted((value for token, value in found.items()), reverse=True)[:num_likeliest]
        for value, best in zip(likeliest, row.topk(num_likeliest).values.tolist(), strict=False):
            assert abs(value - best) <= TOLERANCE
        assert len(found) >= num_likeliest


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.each_value_quick
def test_prompts_of_all_lengths(model: tuple[Any, Path], setting: str) -> None:
    oracle, folder = model
    core = make_core(folder, **SETTINGS[setting])
    for prompt, params, result in zip(PROMPTS, PARAMS, run(core, PROMPTS, PARAMS), strict=True):
        assert_equals_oracle(oracle, prompt, params, result)
    core.close()


def test_a_cached_prefix_is_not_read_but_written(model: tuple[Any, Path]) -> None:
    oracle, folder = model
    core = make_core(folder, block_size=4)
    params = greedy(3, prompt_logprobs=1)
    for _ in range(2):
        result = run(core, [PROMPTS[2]], params)[0]
        assert result.num_cached_tokens == 0
        assert_equals_oracle(oracle, PROMPTS[2], params, result)
    assert run(core, [PROMPTS[2]], greedy(3))[0].num_cached_tokens >= 36
    core.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.each_value_quick
def test_preempted_requests_are_told_once_and_all(model: tuple[Any, Path], async_scheduling: bool) -> None:
    oracle, folder = model
    core = make_core(
        folder,
        async_scheduling=async_scheduling,
        block_size=4,
        max_model_len=72,
        max_num_batched_tokens=8,
        kv_cache_memory_bytes=24 * 4 * 2 * 2 * 2 * 16 * 4,
    )
    prompts = random_prompts((20, 31, 17, 25, 40, 6), VOCAB_SIZE, seed=7)
    params = [greedy(30, prompt_logprobs=1, logprobs=1)] * len(prompts)
    results = run(core, prompts, params)
    assert sum(result.num_preemptions for result in results) > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert_equals_oracle(oracle, prompt, params[0], result)
    core.close()


class FragileWorker(Worker):
    """Dies at chosen steps."""

    deaths: tuple[int, ...] = ()
    executed = 0

    def execute_model(self, output: SchedulerOutput) -> None:
        cls = type(self)
        cls.executed += 1
        super().execute_model(output)
        if cls.executed in cls.deaths:
            raise RuntimeError("the device is gone")


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.each_value_quick
def test_a_worker_that_dies_amid_prompts_loses_and_repeats_nothing(
    model: tuple[Any, Path], async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, folder = model
    monkeypatch.setattr(FragileWorker, "deaths", (2, 6, 15))
    monkeypatch.setattr(FragileWorker, "executed", 0)
    name = f"{__name__}.FragileWorker"
    core = make_core(folder, worker_cls=name, async_scheduling=async_scheduling, max_num_batched_tokens=13)
    for prompt, params, result in zip(PROMPTS, PARAMS, run(core, PROMPTS, PARAMS), strict=True):
        assert_equals_oracle(oracle, prompt, params, result)
    assert FragileWorker.executed > 15
    core.close()


@pytest.mark.parametrize(("most_results", "most_rows"), [(40, 5), (10, 3)])
@pytest.mark.each_value_quick
def test_logits_are_held_a_few_rows_at_a_time(
    model: tuple[Any, Path], most_results: int, most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts have at most five rows, and no more than ten results, three of each row."""
    oracle, folder = model
    monkeypatch.setattr("penstock.config.sampling._MAX_LOGITS", {"cpu": 5 * VOCAB_SIZE})
    monkeypatch.setattr(prompt_logprobs, "_MAX_RESULTS", most_results)
    core = make_core(folder, max_num_batched_tokens=50)
    language_model = core.collective_rpc(RpcCall("get_model"))[0]
    rows: list[int] = []
    compute_logits = language_model.compute_logits

    def counting(hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        rows.append(len(hidden))
        return compute_logits(hidden, context)

    monkeypatch.setattr(language_model, "compute_logits", counting)
    params = greedy(1, prompt_logprobs=2)
    result = run(core, [PROMPTS[7]], params)[0]
    assert_equals_oracle(oracle, PROMPTS[7], params, result)
    assert max(rows) == most_rows
    assert sum(rows) >= len(PROMPTS[7]) - 1
    core.close()


def test_outputs_have_them_in_the_fields_usual_shape() -> None:
    prompt = "Once upon a time"
    with LLM("demo", device="cpu", num_threads=1, kv_cache_memory_bytes=8 << 20, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
        with_them, without = llm.generate([prompt, prompt], [params, SamplingParams(max_tokens=1)], use_tqdm=False)
        token_text = llm._session.tokenizer.token_text
    assert without.prompt_logprobs is None
    listed = with_them.prompt_logprobs
    assert listed is not None
    assert listed[0] is None
    assert len(listed) == len(with_them.prompt_token_ids) > 3
    for token, row in zip(with_them.prompt_token_ids[1:], listed[1:], strict=True):
        assert row is not None
        assert row[token].decoded_token == token_text(token)
        assert 2 <= len(row) <= 3
        assert sorted(entry.rank for entry in row.values())[:2] == [1, 2]
        best = max(row.values(), key=lambda entry: entry.logprob)
        assert best.rank == 1
