"""Whole engines whose drafts a model makes: the tokens are those of an engine without, and good drafts are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from penstock.contract import SamplingParams, SchedulerOutput
from penstock.engine.core.engine_core import EngineCore
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_checkpoint
from support.draft_heads import eagle3_weights, eagle_weights, write_head, write_mimo
from support.engines import Result, add, greedy, make_core, random_prompts, run
from support.padding import pad_every_step
from support.transformers_models import tiny_transformers_model

NUM_DRAFTS = 3
# Of the target and the drafter together.
NUM_LAYERS = {"draft_model": 7, "eagle": 6, "eagle3": 6, "mtp": 3}
METHODS = ["draft_model", "eagle", "eagle3", "mtp"]
DRAWN: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
PROMPTS = random_prompts((5, 21, 1, 40, 13, 8), VOCAB_SIZE, seed=3)
PARAMS = [
    greedy(30),
    SamplingParams(**DRAWN, seed=1, max_tokens=20, logprobs=2),
    greedy(24, logprobs=0),
    SamplingParams(**DRAWN, seed=2, max_tokens=25, presence_penalty=0.5, repetition_penalty=1.2, top_k=9),
    SamplingParams(**DRAWN, seed=3, max_tokens=19, min_tokens=12, bad_words_token_ids=[[5, 6], [9]]),
    greedy(9, prompt_logprobs=1),
]
ROOM = {"dtype": "float32", "max_model_len": 68}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and drafters of each kind that know nothing: what they draft is mostly wrong."""
    folder = tmp_path_factory.mktemp("models")
    tiny_checkpoint(folder / "target", num_hidden_layers=5)
    tiny_checkpoint(folder / "draft_model", "qwen3", seed=7, head_dim=32, num_key_value_heads=1)
    write_head(folder / "eagle", eagle_weights())
    write_head(folder / "eagle3", eagle3_weights(), draft_vocab_size=40)
    write_mimo(folder / "mimo")
    # Runs through Transformers.
    save_checkpoint(tiny_transformers_model("GPTNeoXForCausalLM"), folder / "neox")
    return folder


def target_of(models: Path, method: str) -> Path:
    return models / ("mimo" if method == "mtp" else "target")


def drafting(models: Path, method: str, *, adaptive: bool = False, **options: Any) -> EngineCore:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": NUM_DRAFTS, "adaptive": adaptive}
    if method != "mtp":
        config["model"] = str(models / method)
    worker = f"{__name__}.WatchedWorker"
    return make_core(target_of(models, method), **{**ROOM, **options}, speculative_config=config, worker_cls=worker)


class WatchedWorker(Worker):
    """Notes what it is asked for."""

    outputs: ClassVar[list[SchedulerOutput]] = []

    def execute_model(self, output: SchedulerOutput) -> None:
        self.outputs.append(output)
        super().execute_model(output)


@pytest.fixture(autouse=True)
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[SchedulerOutput]:
    seen: list[SchedulerOutput] = []
    monkeypatch.setattr(WatchedWorker, "outputs", seen)
    return seen


_EXPECTED: dict[Path, list[Result]] = {}


def expected(folder: Path) -> list[Result]:
    """Output of the engine without speculative decoding."""
    if folder not in _EXPECTED:
        core = make_core(folder, **ROOM)
        _EXPECTED[folder] = run(core, PROMPTS, PARAMS)
        core.close()
    return _EXPECTED[folder]


def assert_same(found: Sequence[Result], right: Sequence[Result]) -> None:
    for one, other in zip(found, right, strict=True):
        assert one.error is None
        assert one.tokens == other.tokens
        assert [list(row) for row in one.logprobs] == [list(row) for row in other.logprobs]
        assert [list(row) for row in one.prompt_logprobs or ()] == [list(row) for row in other.prompt_logprobs or ()]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 9, "max_num_seqs": 3},
        {"block_size": 4, "max_model_len": 68},
        {"attention_backend": "cpu_paged"},
        {"attention_backend": "reference", "fast_paths": "off"},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.one_case_quick
def test_tokens_are_those_of_an_engine_without_drafts(
    models: Path, method: str, options: dict[str, Any], async_scheduling: bool, outputs: list[SchedulerOutput]
) -> None:
    if "block_size" in options:
        options = {**options, "kv_cache_memory_bytes": NUM_LAYERS[method] * 30 * 4 * 256}
    core = drafting(models, method, async_scheduling=async_scheduling, **options)
    found = run(core, PROMPTS, PARAMS)
    assert_same(found, expected(target_of(models, method)))
    core.step()
    assert core.scheduler.kv_cache.num_used_blocks == 0
    core.close()
    assert any(output.scheduled_spec_decode_tokens for output in outputs)
    if "block_size" in options:
        assert sum(result.num_preemptions for result in found) > 0


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.one_case_quick
def test_cached_prefixes_change_nothing(models: Path, method: str, async_scheduling: bool) -> None:
    core = drafting(models, method, async_scheduling=async_scheduling, block_size=4)
    for _ in range(2):
        found = run(core, PROMPTS, PARAMS)
        assert_same(found, expected(target_of(models, method)))
    assert sum(result.num_cached_tokens for result in found) > 50
    core.close()


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.one_case_quick
def test_drafting_now_and_then_changes_nothing(models: Path, method: str, async_scheduling: bool) -> None:
    core = drafting(models, method, async_scheduling=async_scheduling, adaptive=True)
    assert_same(run(core, PROMPTS, PARAMS), expected(target_of(models, method)))
    core.close()


@pytest.mark.parametrize("rejection_sample_method", ["standard", "synthetic"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.one_case_quick
def test_drafts_may_be_kept_by_another_rule(models: Path, method: str, rejection_sample_method: str) -> None:
    rule: dict[str, Any] = {"rejection_sample_method": rejection_sample_method}
    if rejection_sample_method == "synthetic":
        rule["synthetic_acceptance_rates"] = [1.0, 1.0, 1.0]
    config = {"method": method, "num_speculative_tokens": NUM_DRAFTS, "adaptive": False, **rule}
    if method != "mtp":
        config["model"] = str(models / method)
    core = make_core(target_of(models, method), **ROOM, speculative_config=config)
    drawn = SamplingParams(**DRAWN, seed=1, max_tokens=20)
    found = run(core, PROMPTS[:2], [greedy(20), drawn])
    core.close()
    assert [len(result.tokens) for result in found] == [20, 20]
    if rejection_sample_method == "standard":
        assert found[0].tokens == expected(target_of(models, method))[0].tokens[:20]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.each_value_quick
def test_padding_changes_nothing(models: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = expected(target_of(models, method))
    pad_every_step(monkeypatch)
    core = drafting(models, method)
    assert_same(run(core, PROMPTS, PARAMS), right)
    core.close()


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.one_case_quick
def test_a_worker_that_is_replaced_costs_no_token(
    models: Path, method: str, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = drafting(models, method, async_scheduling=async_scheduling)
    execute = WatchedWorker.execute_model

    def fails_once(worker: WatchedWorker, output: SchedulerOutput) -> None:
        execute(worker, output)
        if len(worker.outputs) == 9:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(WatchedWorker, "execute_model", fails_once)
    assert_same(run(core, PROMPTS, PARAMS), expected(target_of(models, method)))
    core.close()


def mean_accepted(outputs: Sequence[SchedulerOutput], num_tokens: int) -> float:
    """Tokens of a step that verified drafts, of one request."""
    verifying = [output for output in outputs if output.num_scheduled_tokens]
    return num_tokens / len(verifying)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize("target", ["target", "neox"])
@pytest.mark.parametrize(
    "params",
    [
        greedy(40),
        SamplingParams(**DRAWN, seed=5, max_tokens=40),
        SamplingParams(temperature=1.3, top_k=8, top_p=0.9, seed=6, max_tokens=40, ignore_eos=True),
    ],
    ids=["greedy", "drawn", "truncated"],
)
@pytest.mark.one_case_quick
def test_the_target_as_its_own_draft_model_is_right_each_time(
    models: Path, params: SamplingParams, target: str, async_scheduling: bool, outputs: list[SchedulerOutput]
) -> None:
    config = {"method": "draft_model", "model": str(models / target), "num_speculative_tokens": 3, "adaptive": False}
    core = make_core(
        models / target,
        **ROOM,
        speculative_config=config,
        worker_cls=f"{__name__}.WatchedWorker",
        async_scheduling=async_scheduling,
        max_num_batched_tokens=7,
    )
    result = run(core, PROMPTS[1:2], params)[0]
    core.close()
    assert len(result.tokens) == 40
    # Three chunks of 7 make the prompt; the last samples the first token, and each step after it four.
    steps = [output for output in outputs if output.num_scheduled_tokens]
    assert len(steps) <= 3 + 10 + async_scheduling
    assert all(len(drafts) == 3 for step in steps[3:-2] for drafts in step.scheduled_spec_decode_tokens.values())


def test_the_rejection_rule_keeps_all_that_the_target_itself_draws(
    models: Path, outputs: list[SchedulerOutput]
) -> None:
    config = {"method": "draft_model", "model": str(models / "target"), "num_speculative_tokens": 3, "adaptive": False}
    core = make_core(
        models / "target",
        **ROOM,
        speculative_config={**config, "rejection_sample_method": "standard"},
        worker_cls=f"{__name__}.WatchedWorker",
        async_scheduling=False,
    )
    params = [
        SamplingParams(temperature=1.2, top_p=0.95, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(3)
    ]
    assert [len(result.tokens) for result in run(core, PROMPTS[:3], params)] == [40] * 3
    core.close()
    # The first step samples a token, and each of the others four.
    assert len([output for output in outputs if output.num_scheduled_tokens]) <= 3 + 10


def test_mixed_batches_accept_all_that_the_target_drafts(models: Path, outputs: list[SchedulerOutput]) -> None:
    config = {"method": "draft_model", "model": str(models / "target"), "num_speculative_tokens": 2, "adaptive": False}
    options = {"max_num_batched_tokens": 20, "async_scheduling": False, "speculative_config": config}
    core = make_core(models / "target", **ROOM, **options, worker_cls=f"{__name__}.WatchedWorker")
    params = [greedy(24) if index % 2 else SamplingParams(**DRAWN, seed=index, max_tokens=24) for index in range(6)]
    results: dict[str, Result] = {}
    for index, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True)):
        add(core, f"r{index}", prompt, one)
    while core.has_unfinished_requests():
        steps = len(outputs)
        known = {req_id: len(result.tokens) for req_id, result in results.items()}
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
        for step in outputs[steps:]:
            for req_id, drafts in step.scheduled_spec_decode_tokens.items():
                assert len(results[req_id].tokens) - known[req_id] == 1 + len(drafts)
    core.close()
    assert all(len(result.tokens) == 24 for result in results.values())
