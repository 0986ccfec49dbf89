"""Whole engines whose requests are drafted at random: accepted or rejected, the tokens are those of a run without."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.contract import SamplingParams
from penstock.engine.core import EngineCore
from penstock.runner.model_runner import RunnerLimits
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run
from support.padding import pad_every_step

MAX_DRAFTS = 3
PROMPTS = random_prompts((5, 21, 1, 40, 13, 8), VOCAB_SIZE, seed=3)
DRAWN: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
PARAMS = [
    greedy(30),
    SamplingParams(**DRAWN, seed=1, max_tokens=20, logprobs=2),
    greedy(24, logprobs=0),
    SamplingParams(**DRAWN, seed=2, max_tokens=25, presence_penalty=0.5, repetition_penalty=1.2, top_k=9),
    SamplingParams(**DRAWN, seed=3, max_tokens=19, min_tokens=12, bad_words_token_ids=[[5, 6], [9]]),
    greedy(9, prompt_logprobs=1),
]


class DraftingWorker(Worker):
    """Takes drafts."""

    def _limits(self, max_model_len: int) -> RunnerLimits:
        return replace(super()._limits(max_model_len), max_drafts=MAX_DRAFTS)


class FakeSpeculator:
    """Knows what must come, and says so or something else."""

    def __init__(self, core: EngineCore, truth: list[list[int]], seed: int) -> None:
        self._core = core
        self._truth = truth
        self._rng = random.Random(seed)

    def draft(self, results: dict[str, Result]) -> None:
        drafts = {}
        for index, truth in enumerate(self._truth):
            num_known = len(results[f"r{index}"].tokens) if f"r{index}" in results else 0
            ahead = truth[num_known : num_known + self._rng.randint(0, MAX_DRAFTS)]
            num_right = self._rng.randint(0, len(ahead))
            drafts[f"r{index}"] = ahead[:num_right] + [self._rng.randrange(VOCAB_SIZE) for _ in ahead[num_right:]]
        self._core.scheduler.update_draft_token_ids(drafts)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"block_size": 4, "max_model_len": 68, "kv_cache_memory_bytes": 30 * 4 * 512},
        {"max_num_batched_tokens": 9, "max_num_seqs": 3},
        {"attention_backend": "cpu_paged"},
        {"attention_backend": "reference", "async_scheduling": True},
    ],
    ids=str,
)
def test_tokens_are_those_of_a_run_without_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], is_padded: bool
) -> None:
    tiny_checkpoint(tmp_path)
    core = make_core(tmp_path, dtype="float32", attention_backend=options.get("attention_backend"))
    expected = run(core, PROMPTS, PARAMS)
    core.close()
    if is_padded:
        pad_every_step(monkeypatch)
    core = make_core(tmp_path, dtype="float32", worker_cls=f"{__name__}.DraftingWorker", **options)
    speculator = FakeSpeculator(core, [result.tokens for result in expected], seed=4)
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        add(core, f"r{index}", prompt, params)
    results: dict[str, Result] = {}
    num_by_step = []
    while core.has_unfinished_requests():
        speculator.draft(results)
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
            num_by_step.append(len(output.new_token_ids))
    finish(core, results)
    for index, right in enumerate(expected):
        found = results[f"r{index}"]
        assert found.error is None
        assert found.tokens == right.tokens
        assert [list(row) for row in found.logprobs] == [list(row) for row in right.logprobs]
        assert [list(row) for row in found.prompt_logprobs or ()] == [list(row) for row in right.prompt_logprobs or ()]
    assert max(num_by_step) > 1
    core.step()
    assert core.scheduler.kv_cache.pool.num_used_blocks == 0
    core.close()
