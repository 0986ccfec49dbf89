"""Greedy steps that the worker runs several at once, beside the same steps one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.contract import SamplingParams
from penstock.engine.core import EngineCore
from penstock.kernels.native import NATIVE
from penstock.models.program import GreedyStep
from penstock.runner import greedy_steps
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run

pytestmark = pytest.mark.skipif(NATIVE is None, reason="programs are made of the C++ kernels")

PROMPTS = random_prompts([1, 5, 33, 70], VOCAB_SIZE)
PARAMS = [greedy(9), greedy(40), greedy(23), greedy(57)]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each call ran that might have run several; a call may take as long as it likes."""
    monkeypatch.setattr(greedy_steps, "_AT_ONCE_S", 60.0)
    found: list[int] = []
    original = GreedyStep.run_steps

    def noted(self: GreedyStep, *arguments: Any) -> list[list[int]] | None:
        earlier = original(self, *arguments)
        found.append(1 if earlier is None else 1 + len(earlier[0]))
        return earlier

    monkeypatch.setattr(GreedyStep, "run_steps", noted)
    return found


def core_of(folder: Path, num_steps: int, **options: Any) -> EngineCore:
    return make_core(folder, num_continuous_decode_steps=num_steps, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": "int4"},
        {"kv_cache_dtype": "int8"},
        {"block_size": 4},
        {"enable_prefix_caching": False},
        {"kv_cache_memory_bytes": 600 << 10},
    ],
    ids=str,
)
def test_tokens_are_the_same(tmp_path: Path, counts: list[int], options: dict[str, Any]) -> None:
    tiny_checkpoint(tmp_path, "qwen3")
    results = []
    for num_steps in (1, 3, 16):
        counts.clear()
        core = core_of(tmp_path, num_steps, **options)
        results.append(run(core, PROMPTS, PARAMS))
        # Again, so that what the first run left in the prefix cache is read.
        results.append(run(core, PROMPTS, PARAMS))
        core.close()
        if num_steps > 1:
            assert 1 < max(counts) <= min(num_steps, options.get("block_size", 16))
    by_order = [[result.tokens for result in of_run] for of_run in results]
    assert by_order == by_order[:1] * 6
    cached = [[result.num_cached_tokens for result in of_run] for of_run in results]
    assert cached == cached[:2] * 3


def test_sliding_windows_give_the_same_tokens(tmp_path: Path, counts: list[int]) -> None:
    tiny_checkpoint(tmp_path, "mistral", sliding_window=20)
    tokens = []
    for num_steps in (1, 16):
        core = core_of(tmp_path, num_steps)
        tokens.append([result.tokens for result in run(core, PROMPTS, PARAMS)])
        core.close()
    assert tokens[0] == tokens[1]
    assert max(counts) > 1


@pytest.mark.parametrize("position", range(4, 12))
def test_a_request_ends_with_its_stop_token_wherever_that_falls(
    tmp_path: Path, counts: list[int], position: int
) -> None:
    tiny_checkpoint(tmp_path)
    core = core_of(tmp_path, 16)
    try:
        (whole,) = run(core, PROMPTS[2:3], greedy(40))
        stop = whole.tokens[position]
        params = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[stop], ignore_eos=True, seed=1)
        (result,) = run(core, PROMPTS[2:3], params)
        assert result.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
        assert result.finish_reason == "stop"
        # The next request finds the blocks of what was said, and no more.
        (after,) = run(core, [PROMPTS[2] + whole.tokens[:30]], greedy(5))
        core.reset_prefix_cache()
        assert run(core, [PROMPTS[2] + whole.tokens[:30]], greedy(5))[0].tokens == after.tokens
        assert max(counts) > 1
    finally:
        core.close()


def test_tokens_from_before_a_failure_arrive(tmp_path: Path, counts: list[int]) -> None:
    """The step that reads a certain token gives logits that are no numbers, in the middle of a call or not."""
    tiny_checkpoint(tmp_path)
    results: dict[int, list[Result]] = {}
    for num_steps in (1, 16):
        core = core_of(tmp_path, num_steps, dtype="float32")
        (whole,) = run(core, PROMPTS[1:2], greedy(40))
        bad = next(token for token in whole.tokens[6:] if token not in whole.tokens[:6] + PROMPTS[1] + PROMPTS[3])
        core.close()
        core = core_of(tmp_path, num_steps, dtype="float32")
        core.collective_rpc("apply_model", args=(lambda model, bad=bad: _spoil_row(model, bad),))
        results[num_steps] = run(core, [PROMPTS[1], PROMPTS[3]], greedy(40))
        core.close()
        failed = results[num_steps][0]
        assert failed.tokens == whole.tokens[: whole.tokens.index(bad) + 1]
        assert "NaN or infinite" in (failed.error or "")
    assert [result.tokens for result in results[1]] == [result.tokens for result in results[16]]
    assert [result.error for result in results[1]] == [result.error for result in results[16]]
    assert max(counts) > 1


def _spoil_row(model: Any, token: int) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = torch.nan


def test_a_call_ends_when_another_step_would_take_too_long(
    tmp_path: Path, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greedy_steps, "_AT_ONCE_S", 0.0)
    tiny_checkpoint(tmp_path)
    core = core_of(tmp_path, 16)
    run(core, PROMPTS, PARAMS)
    core.close()
    assert set(counts) == {1}


@pytest.mark.parametrize("demand", [{"logprobs": 3}, {"temperature": 0.7}, {"logit_bias": {5: 3.0}}])
def test_a_request_that_wants_more_is_served_step_by_step(
    tmp_path: Path, counts: list[int], demand: dict[str, Any]
) -> None:
    tiny_checkpoint(tmp_path)
    core = core_of(tmp_path, 16)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "seed": 1, "ignore_eos": True, **demand})
    add(core, "plain", PROMPTS[3], greedy(20))
    add(core, "demanding", PROMPTS[2], params)
    results: dict[str, Result] = {}
    finish(core, results)
    core.close()
    assert len(results["plain"].tokens) == 20
    assert not counts or set(counts) == {1}
