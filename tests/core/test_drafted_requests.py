"""Whole engines whose requests are drafted at random: accepted or rejected, the tokens are those of a run without."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from penstock.contract import DraftTokenIds, SamplingInput, SamplingParams, SchedulerOutput
from penstock.engine.core.engine_core import EngineCore
from penstock.runner.async_output import AsyncOutput, ReadyOutput
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
@pytest.mark.one_case_quick
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
    assert core.scheduler.kv_cache.num_used_blocks == 0
    core.close()


class SpeculatingWorker(Worker):
    """Drafts on its device after each step, as a speculator would: it knows what must come, and is wrong at times.

    truth: by request, its prompt and all of its tokens. verified: the drafts that steps had. taken: those that the core
    asked for. failures: what asking raises, once each.
    """

    num_speculative_tokens = MAX_DRAFTS
    truth: ClassVar[dict[str, list[int]]] = {}
    verified: ClassVar[list[dict[str, list[int]]]] = []
    taken: ClassVar[list[DraftTokenIds]] = []
    failures: ClassVar[list[Exception]] = []

    def execute_model(self, output: SchedulerOutput) -> None:
        super().execute_model(output)
        self.verified.append(output.scheduled_spec_decode_tokens)

    def sample_tokens(self, sampling: SamplingInput) -> AsyncOutput | ReadyOutput:
        result = super().sample_tokens(sampling)
        requests, rng = self.runner.requests, random.Random(sampling.step_id)
        for req_id, slot in requests.slot_of.items():
            num_known = int(requests.total_len.tensor[slot, 0])
            ahead = [*self.truth[req_id][num_known:], *[0] * MAX_DRAFTS][:MAX_DRAFTS]
            drafts = [draft if rng.random() < 0.8 else rng.randrange(VOCAB_SIZE) for draft in ahead]
            requests.draft_token_ids.tensor[slot] = torch.tensor(drafts, dtype=torch.int32)
        return result

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        if self.failures:
            raise self.failures.pop()
        requests = self.runner.requests
        drafts = [requests.draft_token_ids.tensor[slot].tolist() for slot in requests.slot_of.values()]
        # And drafts of a request that the scheduler does not know, which it ignores.
        self.taken.append(DraftTokenIds(req_ids=[*requests.slot_of, "unknown"], draft_token_ids=[*drafts, [1]]))
        return self.taken[-1]


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """Outputs of a run without speculative decoding, from which the speculating worker drafts."""
    tiny_checkpoint(tmp_path)
    core = make_core(tmp_path, dtype="float32")
    results = run(core, PROMPTS, PARAMS)
    core.close()
    truth = {f"r{index}": [*PROMPTS[index], *result.tokens] for index, result in enumerate(results)}
    for name, value in {"truth": truth, "verified": [], "taken": [], "failures": []}.items():
        monkeypatch.setattr(SpeculatingWorker, name, value)
    return results


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 3}, {"block_size": 4, "kv_cache_memory_bytes": 30 * 4 * 512}],
    ids=str,
)
@pytest.mark.each_value_quick
def test_what_the_workers_speculator_drafts_is_verified(
    tmp_path: Path, expected: list[Result], options: dict[str, Any], async_scheduling: bool
) -> None:
    options = {**options, "async_scheduling": async_scheduling, "max_model_len": 68}
    core = make_core(tmp_path, dtype="float32", worker_cls=f"{__name__}.SpeculatingWorker", **options)
    found = run(core, PROMPTS, PARAMS)
    core.step()
    assert core.scheduler.kv_cache.num_used_blocks == 0
    core.close()
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    drafts = [tokens for step in SpeculatingWorker.verified for tokens in step.values()]
    assert drafts
    # Those that only the device knows are not read, and those that the host was told are named.
    assert all((token == -1) is async_scheduling for tokens in drafts for token in tokens)
    assert bool(SpeculatingWorker.taken) is not async_scheduling


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
def test_a_speculator_saves_steps(tmp_path: Path, expected: list[Result], async_scheduling: bool) -> None:
    core = make_core(
        tmp_path, dtype="float32", worker_cls=f"{__name__}.SpeculatingWorker", async_scheduling=async_scheduling
    )
    run(core, PROMPTS[:1], PARAMS[:1])
    core.close()
    assert len(SpeculatingWorker.verified) < len(expected[0].tokens) * 0.7


def test_a_worker_that_dies_when_asked_for_drafts_costs_no_token(tmp_path: Path, expected: list[Result]) -> None:
    core = make_core(tmp_path, dtype="float32", worker_cls=f"{__name__}.SpeculatingWorker", async_scheduling=False)
    SpeculatingWorker.failures.append(RuntimeError("the device is gone"))
    found = run(core, PROMPTS, PARAMS)
    core.close()
    assert not SpeculatingWorker.failures
    assert [result.tokens for result in found] == [result.tokens for result in expected]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
def test_without_a_speculator_no_request_is_asked_for_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_scheduling: bool
) -> None:
    tiny_checkpoint(tmp_path)
    monkeypatch.setattr(Worker, "take_draft_token_ids", lambda worker: pytest.fail("asked"))
    core = make_core(tmp_path, async_scheduling=async_scheduling)
    assert core._executor.num_speculative_tokens == 0
    assert [len(result.tokens) for result in run(core, PROMPTS, greedy(3))] == [3] * len(PROMPTS)
    core.close()
