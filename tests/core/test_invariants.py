"""Invariants: a request's output does not depend on other requests, on timing, or on worker restarts."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config import EngineConfig
from penstock.contract import (
    KVCacheConfig,
    SampledOutput,
    SamplingInput,
    SamplingParams,
    SchedulerOutput,
    decode,
    encode,
)
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ContextTooLong, EngineDead, InvalidRequest, LifecycleError
from penstock.executor import UniProcExecutor
from penstock.scheduler.outputs import FinishReason
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run
from support.waiting import wait_until

PROMPTS = random_prompts((5, 21, 1, 40, 13, 8, 30, 17, 3, 11, 26, 9, 14, 2, 35, 19), VOCAB_SIZE, seed=11)


def _sampled(seed: int, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[list[int]]:
    """Sampled tokens of each prompt, served alone by a plain engine."""
    core = make_core(folder, fast_paths="auto", enable_prefix_caching=False, max_num_batched_tokens=512)
    tokens = [run(core, [prompt], _sampled(index))[0].tokens for index, prompt in enumerate(PROMPTS)]
    core.close()
    return tokens


def _all_params() -> list[SamplingParams]:
    return [_sampled(index) for index in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_batched_tokens": 17, "max_num_seqs": 5, "block_size": 5},
        {"policy": "priority"},
    ],
    ids=str,
)
@pytest.mark.each_value_quick
def test_sampled_tokens_are_the_same_alone_in_a_batch_and_in_chunks(
    folder: Path, undisturbed: list[list[int]], options: dict[str, Any]
) -> None:
    core = make_core(folder, **options)
    assert [result.tokens for result in run(core, PROMPTS, _all_params())] == undisturbed
    core.close()


def _assert_no_block_is_held(core: EngineCore) -> None:
    pool = core.scheduler.kv_cache.pools[0]
    assert pool.num_used_blocks == 0
    assert pool.num_free_blocks == core.kv_cache_config.pools[0].num_blocks - 1


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), async_scheduling=st.booleans(), num_blocks=st.integers(18, 60))
def test_any_interleaving_of_add_abort_and_preemption_gives_undisturbed_tokens(
    folder: Path, undisturbed: list[list[int]], seed: int, async_scheduling: bool, num_blocks: int
) -> None:
    rng = random.Random(seed)
    core = make_core(
        folder,
        async_scheduling=async_scheduling,
        block_size=4,
        max_model_len=68,
        max_num_batched_tokens=rng.choice([6, 20, 64]),
        max_num_seqs=rng.choice([2, 6, 16]),
        kv_cache_memory_bytes=num_blocks * 4 * 2 * 2 * 2 * 16 * 4,
    )
    results: dict[str, Result] = {}
    waiting = list(range(len(PROMPTS)))
    rng.shuffle(waiting)
    aborted: set[str] = set()
    for _ in range(3000):
        action = rng.random()
        if waiting and action < 0.4:
            index = waiting.pop()
            add(core, f"r{index}", PROMPTS[index], _sampled(index))
            results[f"r{index}"] = Result()
        elif results and action < 0.45:
            victim = rng.choice(sorted(results))
            if results[victim].finish_reason is None:
                aborted.add(victim)
            for output in core.abort_requests([victim, "unknown"]):
                results[output.req_id].take(output)
        else:
            for output in core.step():
                results[output.req_id].take(output)
        if not waiting and not core.has_unfinished_requests():
            break
    finish(core, results)
    core.step()
    for index, expected in enumerate(undisturbed):
        result = results[f"r{index}"]
        if f"r{index}" in aborted:
            assert result.finish_reason == FinishReason.ABORT
            assert result.tokens == expected[: len(result.tokens)]
        else:
            assert result.finish_reason == FinishReason.LENGTH
            assert result.tokens == expected
    _assert_no_block_is_held(core)
    core.close()


def test_a_full_engine_waits_and_fails_no_request(folder: Path, undisturbed: list[list[int]]) -> None:
    core = make_core(folder, max_num_seqs=2, block_size=4, max_model_len=68, kv_cache_memory_bytes=20 * 4 * 512)
    results = run(core, PROMPTS, _all_params())
    assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
    assert [result.tokens for result in results] == undisturbed
    core.close()


def test_two_engines_in_one_process_do_not_know_of_each_other(folder: Path, undisturbed: list[list[int]]) -> None:
    first, second = make_core(folder), make_core(folder, async_scheduling=True, block_size=8)
    results: tuple[dict[str, Result], dict[str, Result]] = ({}, {})
    for index, prompt in enumerate(PROMPTS):
        add((first, second)[index % 2], f"r{index}", prompt, _sampled(index))
    while first.has_unfinished_requests() or second.has_unfinished_requests():
        for core, mine in zip((first, second), results, strict=True):
            for output in core.step():
                mine.setdefault(output.req_id, Result()).take(output)
        if not first.has_unfinished_requests():
            first.close()
            finish(second, results[1])
            break
    merged = {**results[0], **results[1]}
    assert [merged[f"r{index}"].tokens for index in range(len(PROMPTS))] == undisturbed
    second.close()


def test_ten_engines_one_after_another_leave_nothing_behind(folder: Path) -> None:
    process = psutil.Process()

    def life() -> None:
        core = make_core(folder, kv_cache_memory_bytes=32 << 20)
        run(core, PROMPTS[:4], greedy(4))
        core.close()
        core.close()
        gc.collect()

    life()
    life()
    num_bytes, num_threads, num_fds = process.memory_info().rss, process.num_threads(), process.num_fds()
    for _ in range(10):
        life()
    assert process.memory_info().rss - num_bytes < 24 << 20, "ten engines kept memory of the first ones"
    # Threads of earlier tests may end meanwhile, and a thread that was joined is counted for a moment more.
    wait_until(lambda: process.num_threads() <= num_threads, "the threads of ten engines end")
    assert process.num_fds() <= num_fds


def test_a_closed_engine_raises_lifecycle_errors(folder: Path) -> None:
    core = make_core(folder)
    core.close()
    with pytest.raises(LifecycleError, match="closed"):
        core.step()
    with pytest.raises(LifecycleError, match="closed"):
        add(core, "late", [1], greedy(1))


class FragileWorker(Worker):
    """Dies at chosen steps, as a worker whose device fails would: its state is gone."""

    deaths: tuple[int, ...] = ()
    executed = 0

    def execute_model(self, output: SchedulerOutput) -> None:
        cls = type(self)
        cls.executed += 1
        super().execute_model(output)
        if cls.executed in cls.deaths:
            raise RuntimeError("the device is gone")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_when_a_worker_dies_no_request_is_lost_and_none_is_answered_twice(
    folder: Path, undisturbed: list[list[int]], async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FragileWorker, "deaths", (2, 9, 10, 25))
    monkeypatch.setattr(FragileWorker, "executed", 0)
    core = make_core(folder, worker_cls=f"{__name__}.FragileWorker", async_scheduling=async_scheduling)
    assert [result.tokens for result in run(core, PROMPTS, _all_params())] == undisturbed
    assert FragileWorker.executed > 25
    core.step()
    _assert_no_block_is_held(core)
    core.close()


def test_a_worker_that_keeps_dying_ends_the_engine_with_the_root_cause(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FragileWorker, "deaths", tuple(range(1, 100)))
    monkeypatch.setattr(FragileWorker, "executed", 0)
    core = make_core(folder, worker_cls=f"{__name__}.FragileWorker", max_restarts=2)
    add(core, "a", [1, 2], greedy(4))
    with pytest.raises(EngineDead, match="failed 3 times in a row.*RuntimeError: the device is gone"):
        finish(core, {})
    with pytest.raises(EngineDead, match="the device is gone"):
        core.check_health()


class RecordingExecutor(UniProcExecutor):
    """Writes down every message, as bytes."""

    def __init__(self, config: EngineConfig) -> None:
        self.layouts: list[tuple[KVCacheConfig, int]] = []
        self.recording: list[bytes] = []
        self.answers: list[SampledOutput] = []
        super().__init__(config)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        self.layouts.append((kv_cache_config, max_model_len))
        super().initialize_from_config(kv_cache_config, max_model_len)

    def execute_model(self, output: SchedulerOutput) -> None:
        self.recording.append(encode(output))
        super().execute_model(output)


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> list[RecordingExecutor]:
    """Core processes made by engines."""
    made: list[RecordingExecutor] = []

    def record(config: EngineConfig) -> RecordingExecutor:
        made.append(RecordingExecutor(config))
        return made[-1]

    monkeypatch.setattr("penstock.engine.core.startup.create_executor", record)
    return made


def test_a_worker_that_replaces_another_gets_the_same_sizes(
    folder: Path, executors: list[RecordingExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FragileWorker, "deaths", (2,))
    monkeypatch.setattr(FragileWorker, "executed", 0)
    core = make_core(folder, worker_cls=f"{__name__}.FragileWorker", max_model_len=68, block_size=4)
    run(core, [PROMPTS[0]], greedy(3))
    core.close()
    first, second = executors
    [(_, max_model_len)] = first.layouts
    assert second.layouts == first.layouts
    assert max_model_len == 68


def test_a_recorded_stream_of_messages_gives_the_same_tokens_in_another_worker(
    folder: Path, undisturbed: list[list[int]], executors: list[RecordingExecutor]
) -> None:
    core = make_core(folder, async_scheduling=True, block_size=4, max_model_len=68, kv_cache_memory_bytes=60 * 4 * 512)
    assert [result.tokens for result in run(core, PROMPTS, _all_params())] == undisturbed
    config, layout, length = core.config, encode(core.kv_cache_config), core.max_model_len
    core.close()

    replayed = UniProcExecutor(config)
    replayed.initialize_from_config(decode(layout, KVCacheConfig), length)
    tokens: dict[str, list[int]] = {}
    for data in executors[0].recording:
        output = decode(data, SchedulerOutput)
        replayed.execute_model(output)
        answer = replayed.sample_tokens(SamplingInput(step_id=output.step_id)).get_output()
        for req_id, new in zip(answer.req_ids, answer.sampled_token_ids, strict=True):
            tokens.setdefault(req_id, []).extend(new)
    replayed.shutdown()
    assert [tokens[f"r{index}"][:24] for index in range(len(PROMPTS))] == undisturbed


def test_a_request_that_can_never_fit_is_refused_with_the_numbers_and_the_next_is_served(
    folder: Path, undisturbed: list[list[int]]
) -> None:
    core = make_core(folder, max_model_len=64)
    with pytest.raises(ContextTooLong, match="64"):
        add(core, "long", [1] * 64, greedy(4))
    add(core, "twice", PROMPTS[0], _sampled(0))
    with pytest.raises(InvalidRequest, match="twice"):
        add(core, "twice", PROMPTS[0], _sampled(0))
    results: dict[str, Result] = {}
    finish(core, results)
    assert results["twice"].tokens == undisturbed[0]
    core.close()


def test_generation_ends_at_the_contexts_end(folder: Path) -> None:
    core = make_core(folder, max_model_len=20)
    result = run(core, [PROMPTS[4]], greedy(1000))[0]
    assert result.finish_reason == FinishReason.LENGTH
    assert len(result.tokens) == 20 - len(PROMPTS[4])
    core.close()
