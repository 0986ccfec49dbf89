"""Whole engines with a speculator: the tokens are those of an engine without, bit for bit, whatever it guesses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import LLM, AsyncEngine, StreamingInput
from penstock.config import DeviceConfig
from penstock.contract import RecurrentStateSpec, SampledOutput, SamplingParams, SchedulerOutput
from penstock.device import create_device
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import UnsupportedFeature
from penstock.executor import UniProcExecutor
from penstock.kernels.bound_step import StepOutcome
from penstock.runner.sampling import LogitsProcessor, LogitsRows
from penstock.runner.speculative import create
from penstock.runner.speculative.ngram import NgramOnDevice, NgramOnHost
from penstock.scheduler import draft_budget
from penstock.scheduler.step_times import StepTimes
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run

# So eager that most of what is drafted is wrong.
SPECULATIVE = {
    "ngram": {
        "method": "ngram",
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
        "num_speculative_tokens": 3,
        "adaptive": False,
    },
    "suffix": {
        "method": "suffix",
        "num_speculative_tokens": 3,
        "suffix_decoding_max_spec_factor": 4.0,
        "suffix_decoding_min_token_prob": 0.0,
        "adaptive": False,
    },
}
DRAWN: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
THINKING = {"budget": 6, "start_token_ids": [7], "end_token_ids": [8, 9]}
PARAMS = [
    greedy(40),
    SamplingParams(**DRAWN, seed=1, max_tokens=30, logprobs=2),
    greedy(24, logprobs=0),
    SamplingParams(**DRAWN, seed=2, max_tokens=25, presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.2),
    SamplingParams(temperature=0.4, seed=3, max_tokens=39, min_tokens=20, bad_words_token_ids=[[5, 6], [9]], top_k=5),
    greedy(19, prompt_logprobs=1),
    SamplingParams(**DRAWN, seed=4, max_tokens=30, top_p=0.5, min_p=0.01, logit_bias={11: 3.0, 12: -2.0}),
    greedy(30, allowed_token_ids=[4, 5, 6]),
    SamplingParams(temperature=0.3, seed=5, max_tokens=30, stop_token_ids=[11, 50], all_stop_token_ids=[2, 11, 50]),
    greedy(30, extra_args={"by_position": True}),
    greedy(30, extra_args={"by_count": True}),
    SamplingParams(**DRAWN, seed=6, max_tokens=30, extra_args={"thinking_budget": THINKING}),
    greedy(30, num_speculative_tokens=1),
    greedy(30, num_speculative_tokens=0),
]
LENGTHS = (5, 21, 1, 40, 13, 8, 30, 17, 3, 11, 26, 9, 14, 2)
PROMPTS = [prompt * 2 for prompt in random_prompts(LENGTHS, VOCAB_SIZE, seed=3)]
PROCESSORS = [f"{__name__}:ByPosition", f"{__name__}:ByCount"]


class ByPosition(LogitsProcessor):
    """Favours a token that follows from where the row is."""

    name = "by_position"
    takes_drafts = True

    def add_request(self, slot: int, params: SamplingParams, *token_ids: Sequence[int]) -> bool:
        return self.name in (params.extra_args or {})

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        last = self.context.token_ids[rows.slots, rows.positions].long()
        return logits.index_put_((torch.arange(len(logits)), (last + 1) % 7), logits.new_tensor(50.0))


class ByCount(LogitsProcessor):
    """Goes by the number of sampled tokens, of which it is told afterwards: it cannot tell what follows a draft."""

    name = "by_count"

    def add_request(self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> bool:
        self.counts = getattr(self, "counts", torch.zeros(self.context.num_slots, dtype=torch.int64))
        self.counts[slot] = len(output)
        return self.name in (params.extra_args or {})

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        assert len(set(rows.slots_np.tolist())) == len(rows.slots_np)
        return logits.index_put_((torch.arange(len(logits)), self.counts[rows.slots] // 5), logits.new_tensor(50.0))

    def advance(self, slots: Tensor, slots_np: np.ndarray, outcome: StepOutcome) -> None:
        self.counts.index_add_(0, slots, outcome.num_sampled)


class Recording:
    """The steps of engines, as their worker saw them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[SchedulerOutput] = []
        execute = Worker.execute_model

        def record(worker: Worker, output: SchedulerOutput) -> None:
            self.steps.append(output)
            execute(worker, output)

        monkeypatch.setattr(Worker, "execute_model", record)

    @property
    def drafts(self) -> dict[str, list[list[int]]]:
        """By request, what each of its steps verified."""
        found: dict[str, list[list[int]]] = {}
        for step in self.steps:
            for req_id, tokens in step.scheduled_spec_decode_tokens.items():
                found.setdefault(req_id, []).append(tokens)
        return found


def assert_same(found: Sequence[Result], expected: Sequence[Result]) -> None:
    for index, (result, right) in enumerate(zip(found, expected, strict=True)):
        assert result.error is None, f"r{index}"
        assert result.tokens == right.tokens, f"r{index}"
        assert result.finish_reason == right.finish_reason, f"r{index}"
        assert result.logprobs == right.logprobs, f"r{index}"
        assert result.prompt_logprobs == right.prompt_logprobs, f"r{index}"


def assert_nothing_is_held(core: EngineCore) -> None:
    core.step()
    assert core.scheduler.kv_cache.num_used_blocks == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Result]:
    """Output of an engine without a speculator."""
    core = make_core(folder, dtype="float32", fast_paths="auto", logits_processors=PROCESSORS)
    results = run(core, PROMPTS, PARAMS)
    core.close()
    return results


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    return Recording(monkeypatch)


@pytest.fixture(params=list(SPECULATIVE))
def speculative(request: pytest.FixtureRequest) -> dict[str, Any]:
    config: dict[str, Any] = SPECULATIVE[request.param]
    return config


def make_speculating_core(folder: Path, speculative: dict[str, Any], **options: Any) -> EngineCore:
    options = {"dtype": "float32", "logits_processors": PROCESSORS, **options}
    return make_core(folder, speculative_config=speculative, **options)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 9, "max_num_seqs": 3},
        {"block_size": 4, "max_model_len": 120, "kv_cache_memory_bytes": 40 * 4 * 512},
        {"attention_backend": "cpu_paged", "fast_paths": "off"},
    ],
    ids=["whole", "chunks", "preemption", "plain path"],
)
@pytest.mark.one_case_quick
def test_tokens_are_those_of_an_engine_without(
    folder: Path,
    expected: list[Result],
    recording: Recording,
    speculative: dict[str, Any],
    options: dict[str, Any],
    async_scheduling: bool,
) -> None:
    core = make_speculating_core(folder, speculative, async_scheduling=async_scheduling, **options)
    found = run(core, PROMPTS, PARAMS)
    if "block_size" in options:
        assert core.scheduler.num_preemptions > 0
    assert_nothing_is_held(core)
    core.close()
    # Bits are those of one attention kernel with one size of blocks.
    if "attention_backend" not in options and "block_size" not in options:
        assert_same(found, expected)
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    # Some were accepted: fewer steps than tokens.
    assert sum(map(len, recording.drafts.values())) > 50
    assert max(len(tokens) for steps in recording.drafts.values() for tokens in steps) == 3
    num_steps = sum("r7" in step.num_scheduled_tokens for step in recording.steps)
    assert num_steps < len(expected[7].tokens)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 3}], ids=["whole", "chunks"])
@pytest.mark.one_case_quick
def test_tokens_are_the_same_however_many_drafts_seem_to_pay(
    folder: Path,
    expected: list[Result],
    recording: Recording,
    monkeypatch: pytest.MonkeyPatch,
    speculative: dict[str, Any],
    options: dict[str, Any],
    async_scheduling: bool,
) -> None:
    rng = np.random.default_rng(5)

    def seconds(times: StepTimes, num_reqs: int, most_drafts: int) -> np.ndarray:
        # As many as come first, any number, or none at all.
        slope = float(rng.choice([0.0, 0.2, 0.5, 1.0, 5.0]))
        return 1.0 + slope * np.arange(1 + most_drafts) / num_reqs

    monkeypatch.setattr(StepTimes, "seconds", seconds)
    monkeypatch.setattr(draft_budget, "_FIRST_PAUSE", 3)
    monkeypatch.setattr(draft_budget, "_LONGEST_PAUSE", 3)
    config = {**speculative, "adaptive": True}
    core = make_speculating_core(folder, config, async_scheduling=async_scheduling, **options)
    assert core._engine is not None
    costs = core._engine.step_costs
    assert costs is not None
    assert [size for size, _ in costs] == [1 << power for power in range(len(costs))]
    assert all(seconds > 0.0 for _, seconds in costs)
    found = run(core, PROMPTS, PARAMS)
    assert_nothing_is_held(core)
    core.close()
    assert_same(found, expected)
    numbers = {len(tokens) for steps in recording.drafts.values() for tokens in steps}
    assert numbers == {1, 2, 3}
    wanted = [step.num_drafts_wanted for step in recording.steps]
    assert {0, 3} <= set(wanted)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
def test_a_device_whose_tokens_the_host_cannot_read_drafts_the_same(
    folder: Path,
    expected: list[Result],
    recording: Recording,
    monkeypatch: pytest.MonkeyPatch,
    async_scheduling: bool,
) -> None:
    drafts = []
    device = create_device(DeviceConfig(device="cpu", num_threads=1))
    for speculator in (NgramOnHost, lambda config: NgramOnDevice(config, device)):
        monkeypatch.setattr(create, "NgramOnHost", speculator)
        core = make_speculating_core(folder, SPECULATIVE["ngram"], async_scheduling=async_scheduling)
        assert_same(run(core, PROMPTS, PARAMS), expected)
        assert_nothing_is_held(core)
        core.close()
        drafts.append(recording.drafts)
        recording.steps.clear()
    assert drafts[0] == drafts[1]
    assert drafts[0]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
def test_a_request_gets_as_few_drafts_as_it_wants(
    folder: Path, recording: Recording, speculative: dict[str, Any], async_scheduling: bool
) -> None:
    core = make_speculating_core(folder, speculative, async_scheduling=async_scheduling)
    prompt = [5, 6, 7, 8] * 6
    run(core, [prompt] * 4, [greedy(20, num_speculative_tokens=num) for num in (0, 1, None, 50)])
    core.close()
    most = {req_id: max(map(len, steps)) for req_id, steps in recording.drafts.items()}
    assert most == {"r1": 1, "r2": 3, "r3": 3}


def test_drafts_that_no_processor_can_judge_are_not_made(
    folder: Path, recording: Recording, speculative: dict[str, Any]
) -> None:
    core = make_speculating_core(folder, speculative)
    prompt = [5, 6, 7, 8] * 6
    run(core, [prompt] * 2, [greedy(20, extra_args={name: True}) for name in ("by_count", "by_position")])
    core.close()
    assert set(recording.drafts) == {"r1"}


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.one_case_quick
def test_what_was_rejected_is_not_found_as_a_cached_prefix(
    folder: Path, speculative: dict[str, Any], async_scheduling: bool
) -> None:
    core = make_speculating_core(folder, speculative, async_scheduling=async_scheduling, block_size=4)
    first = run(core, PROMPTS, PARAMS)
    # What went on with these is in the cache now, and only that.
    longer = [[*prompt, *result.tokens[:-1]] for prompt, result in zip(PROMPTS, first, strict=True)]
    params = [greedy(12) if index % 2 else SamplingParams(**DRAWN, seed=index) for index in range(len(longer))]
    again = run(core, longer, params)
    core.close()
    core = make_core(folder, dtype="float32", enable_prefix_caching=False)
    right = run(core, longer, params)
    core.close()
    assert sum(result.num_cached_tokens for result in again) > 100
    assert [result.tokens for result in again] == [result.tokens for result in right]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.one_case_quick
def test_contexts_end_where_they_end_without_drafts(
    folder: Path, speculative: dict[str, Any], async_scheduling: bool
) -> None:
    prompts = [[5, 6, 7, 8] * 4, [9] * 15]
    endings = [greedy(num) for num in (1, 2, 3, 5)] + [SamplingParams(temperature=0.0, seed=0, max_tokens=None)]
    for params in endings:
        core = make_core(folder, dtype="float32", max_model_len=31)
        right = run(core, prompts, params)
        core.close()
        core = make_speculating_core(folder, speculative, max_model_len=31, async_scheduling=async_scheduling)
        assert_same(run(core, prompts, params), right)
        assert_nothing_is_held(core)
        core.close()


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.each_value_quick
def test_an_aborted_request_leaves_the_others_alone(
    folder: Path, expected: list[Result], speculative: dict[str, Any], async_scheduling: bool
) -> None:
    core = make_speculating_core(folder, speculative, async_scheduling=async_scheduling)
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        add(core, f"r{index}", prompt, params)
    results: dict[str, Result] = {}
    for turn in range(12):
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
        if turn >= 8:
            core.abort_requests([f"r{turn - 8}"])
    finish(core, results)
    assert_nothing_is_held(core)
    core.close()
    assert_same([results[f"r{index}"] for index in range(4, len(PROMPTS))], expected[4:])


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.each_value_quick
def test_a_worker_that_is_replaced_costs_no_token(
    folder: Path,
    expected: list[Result],
    monkeypatch: pytest.MonkeyPatch,
    speculative: dict[str, Any],
    async_scheduling: bool,
) -> None:
    core = make_speculating_core(folder, speculative, async_scheduling=async_scheduling)
    failing = iter([6, 11])
    next_failure = next(failing)
    num_calls = 0
    execute = Worker.execute_model

    def fail_at_times(worker: Worker, output: SchedulerOutput) -> None:
        nonlocal num_calls, next_failure
        num_calls += 1
        if num_calls == next_failure:
            next_failure = next(failing, -1)
            raise RuntimeError("this worker is gone")
        execute(worker, output)

    monkeypatch.setattr(Worker, "execute_model", fail_at_times)
    found = run(core, PROMPTS, PARAMS)
    assert next_failure == -1
    assert_nothing_is_held(core)
    core.close()
    assert [result.tokens for result in found] == [result.tokens for result in expected]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.one_case_quick
def test_texts_that_end_in_stop_strings_or_come_in_numbers_are_the_same(
    speculative: dict[str, Any], async_scheduling: bool
) -> None:
    prompts = ["ROMEO: ROMEO: ROMEO:", "To be, or not to be, that is"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, stop=["\n", "the"]),
        SamplingParams(temperature=0.8, n=3, seed=7, max_tokens=40, stop=["e t", "I"], bad_words=["and"]),
    ]
    texts = []
    for config in (None, speculative):
        with LLM("demo", speculative_config=config, async_scheduling=async_scheduling, max_model_len=256) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        texts.append([(one.text, one.token_ids, one.stop_reason) for output in outputs for one in output.outputs])
    assert texts[0] == texts[1]


@pytest.mark.one_case_quick
def test_a_prompt_that_comes_in_parts_is_answered_the_same(speculative: dict[str, Any]) -> None:
    async def parts() -> AsyncGenerator[StreamingInput, None]:
        for text in ("ROMEO: ", "ROMEO: ROMEO: ", "ROMEO: "):
            yield StreamingInput(text)
            await asyncio.sleep(0)

    async def answer(config: dict[str, Any] | None) -> list[int]:
        engine = AsyncEngine("demo", speculative_config=config, max_model_len=256, enable_multiprocessing=False)
        try:
            params = SamplingParams(temperature=0.7, seed=1, max_tokens=20)
            outputs = [output async for output in engine.generate(parts(), params)]
        finally:
            engine.shutdown()
        return outputs[-1].outputs[0].token_ids

    assert asyncio.run(answer(speculative)) == asyncio.run(answer(None))


def test_what_was_said_before_is_drafted_to_others(folder: Path, recording: Recording) -> None:
    core = make_speculating_core(folder, {"method": "suffix", "adaptive": False})
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=60, ignore_eos=True)
    runs, num_steps = [], []
    for _ in range(2):
        runs.append(run(core, PROMPTS[1:2], params))
        num_steps.append(len(recording.steps))
    core.close()
    assert runs[0][0].tokens == runs[1][0].tokens
    assert num_steps[1] - num_steps[0] < num_steps[0] / 2


def test_a_state_that_cannot_be_rolled_back_is_no_place_for_drafts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, speculative: dict[str, Any]
) -> None:
    specs = [{"layers.0.mixer": RecurrentStateSpec(state_bytes=64, block_size=16)}]
    monkeypatch.setattr(UniProcExecutor, "get_kv_cache_specs", lambda executor: specs)
    with pytest.raises(
        UnsupportedFeature, match=r"speculative_config: layers.0.mixer keeps a state .* cannot roll it back"
    ):
        make_speculating_core(folder, speculative)


def test_results_have_as_many_tokens_as_were_accepted(folder: Path, speculative: dict[str, Any]) -> None:
    core = make_speculating_core(folder, speculative)
    sizes = []
    take = core.scheduler.update_from_output

    def note(output: SchedulerOutput, results: Any) -> Any:
        assert isinstance(results, SampledOutput)
        sizes.extend(map(len, results.sampled_token_ids))
        return take(output, results)

    core.scheduler.update_from_output = note  # type: ignore[method-assign]
    run(core, [[5, 6, 7, 8] * 6], greedy(40, allowed_token_ids=[4]))
    core.close()
    assert max(sizes) == 4


def test_what_became_of_drafts_is_told_per_request_and_in_all(
    recording: Recording, speculative: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    prompts = ["ROMEO: ROMEO: ROMEO:", "To be, or not to be, that is to be"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.8, n=2, seed=7, max_tokens=40, stop=["e t"]),
    ]
    with (
        caplog.at_level("INFO", logger="penstock"),
        LLM("demo", speculative_config=speculative, max_model_len=256) as llm,
    ):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        plain = llm.generate(prompts[0], SamplingParams(max_tokens=5, num_speculative_tokens=0), use_tqdm=False)
        in_all = llm._session._core.scheduler.spec_decode_metrics  # type: ignore[attr-defined]
    assert plain[0].metrics.spec_decode_metrics.num_drafts == 0
    first = outputs[0].metrics.spec_decode_metrics
    # Each step brings a token besides what was accepted.
    (core_id,) = [req_id for req_id in recording.drafts if req_id.startswith(outputs[0].request_id)][:1]
    steps = [step for step in recording.steps if core_id in step.num_scheduled_tokens]
    assert len(steps) + first.num_accepted_tokens >= 40
    assert first.num_drafts == len(recording.drafts[core_id])
    assert first.num_draft_tokens == sum(map(len, recording.drafts[core_id]))
    assert sum(first.num_accepted_tokens_per_pos) == first.num_accepted_tokens > 0
    assert first.num_accepted_tokens_per_pos == sorted(first.num_accepted_tokens_per_pos, reverse=True)
    assert first.mean_acceptance_length == 1 + first.num_accepted_tokens / first.num_drafts
    both = outputs[1].metrics.spec_decode_metrics.num_draft_tokens + first.num_draft_tokens
    assert 0 <= in_all.num_draft_tokens - both <= 2 * 3
    assert f"{in_all.num_accepted_tokens:,} of {in_all.num_draft_tokens:,} drafts accepted" in caplog.text
