"""Whatever happens to requests of a model with states, their bits are those of a run alone, and no state is lost."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from core.plugins import assert_equal, running_sum, write_checkpoint
from penstock.config import EngineConfig
from penstock.contract import KVCacheConfig, KVCacheSpec, RecurrentStateSpec, RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.messages import EngineRequest
from penstock.engine.processes.core_group import CoreGroup
from penstock.errors import ProcessLost
from penstock.features.lora.request import LoRARequest
from penstock.scheduler.kv_cache_plan import group_layers, make_kv_cache_config
from support.adapters import make_adapter, parts_of, request_of
from support.checkpoints import RECURRENT, VOCAB_SIZE, tiny_checkpoint, tiny_model
from support.disturbed_workers import FailingWorker
from support.engines import SMALL, Result, add, finish, greedy, make_core, random_prompts, run
from support.waiting import wait_until

BASE = random_prompts((30,), VOCAB_SIZE, seed=5)[0]
# Prompts that part from another one early, late, at borders of blocks, or not at all; some repeat themselves.
PROMPTS = [[*BASE[:length], *tail] for length in (3, 12, 16, 17, 29) for tail in ([], [1], [2, 1, 2, 1, 2, 1, 2])]
PARAMS = greedy(12, logprobs=1)
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 64, "max_num_seqs": 4}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
ENGINES: dict[str, dict[str, Any]] = {
    "align": {"max_num_batched_tokens": 13},
    "all, drafts": {"max_num_batched_tokens": 24, "mamba_cache_mode": "all", **NGRAM},
    "drafts, synchronous": {"max_num_batched_tokens": 7, "async_scheduling": False, **NGRAM},
    "further apart": {"mamba_block_size": 8, "max_num_batched_tokens": 24, "fast_paths": "off"},
}
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 4}
KINDS = 2 * len(PROMPTS)
NUM_REQUESTS = 24
MOVES = st.one_of(
    st.tuples(st.just("add"), st.integers(0, KINDS - 1)),
    st.tuples(st.just("add"), st.integers(0, KINDS - 1)),
    st.tuples(st.just("steps"), st.integers(1, 6)),
    st.tuples(st.just("steps"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["abort", "preempt", "reset", "kill"]), st.integers(0, 9)),
)


class DyingWorker(FailingWorker):
    """Fails in steps that a test names."""

    fails_at: ClassVar[set[tuple[str, int]]] = set()


class Engine:
    """An engine whose pools are too small for all requests, and the results of each prompt alone."""

    def __init__(self, folder: Path, options: dict[str, Any], adapters: Sequence[LoRARequest | None] = (None,)) -> None:
        self.asked, self.alone = _asked_and_alone(folder, adapters)
        self.core = _core_with_small_pools(folder, **OPTIONS, **options, worker_cls=f"{__name__}.DyingWorker")
        self.results: dict[str, Result] = {}
        self.kinds: dict[str, int] = {}
        self.salted: set[str] = set()
        self.numbers = count()

    def play(self, moves: list[tuple[str, int]]) -> None:
        """Make the moves, and run all requests to their end."""
        scheduler = self.core.scheduler
        for move, number in moves:
            if move == "add":
                self._add(number % len(self.asked))
            elif move == "steps":
                self._steps(number)
            elif move == "abort" and self.kinds:
                self._take(self.core.abort_requests([list(self.kinds)[-1 - number % len(self.kinds)]]))
            elif move == "preempt":
                scheduler.preempt_all()
            elif move == "reset":
                self.core.reset_prefix_cache(reset_running_requests=number % 2 == 0)
            elif move == "kill":
                DyingWorker.fails_at = {("execute", scheduler._next_step_id + number % 3)}
            scheduler.kv_cache.check_integrity()
            if any(kind == "kill" for kind, _ in moves) and not DyingWorker.fails_at:
                event("lost its worker")
        DyingWorker.fails_at = set()
        for _ in range(500):
            if not self.core.has_unfinished_requests():
                break
            self._steps(1)
        self._check()

    def _add(self, kind: int) -> None:
        number = next(self.numbers)
        req_id = f"r{number}"
        self.kinds[req_id] = kind
        # Some have a salt of their own, with which nothing is found.
        if number % 4 == 3:
            self.salted.add(req_id)
        add(self.core, req_id, params=PARAMS, cache_salt=req_id if number % 4 == 3 else None, **self.asked[kind])

    def _steps(self, number: int) -> None:
        for _ in range(number):
            self._take(self.core.step())
            self.core.wait_for_work()

    def _take(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.results.setdefault(output.req_id, Result()).take(output)

    def _check(self) -> None:
        assert not self.core.has_unfinished_requests()
        self._steps(2)
        scheduler = self.core.scheduler
        scheduler.kv_cache.check_integrity()
        assert scheduler.kv_cache.num_used_blocks == 0
        for req_id, kind in self.kinds.items():
            result = self.results[req_id]
            _assert_as_alone(result, self.alone[kind])
            if result.num_cached_tokens:
                event("found a prefix")
                assert req_id not in self.salted or result.num_preemptions
            if result.num_preemptions:
                event("preempted")
        self.results.clear()
        self.kinds.clear()
        self.salted.clear()


def _assert_as_alone(result: Result, alone: Result) -> None:
    length = len(result.tokens)
    assert result.error is None
    assert result.finish_reason == "abort" or length == len(alone.tokens)
    assert result.tokens == alone.tokens[:length]
    assert result.logprobs == alone.logprobs[:length]


def _core_with_small_pools(folder: Path, **options: Any) -> EngineCore:
    def sized(config: Any, specs: dict[str, KVCacheSpec], *others: Any) -> KVCacheConfig:
        groups = group_layers(specs)
        counts = {group.pool: 18 if isinstance(group.spec, RecurrentStateSpec) else 40 for group in groups}
        return make_kv_cache_config(groups, [counts[pool] for pool in sorted(counts)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engine.core.startup.size_kv_cache", sized)
        return make_core(folder, **options)


def _asked_and_alone(
    folder: Path, adapters: Sequence[LoRARequest | None] = (None,), num_workers: int = 1
) -> tuple[list[dict[str, Any]], list[Result]]:
    """Each prompt with each adapter, as fields of a request; and the results, of one request at a time."""
    asked = [{"prompt": prompt, "parts": parts_of(adapter)} for adapter in adapters for prompt in PROMPTS]
    options = {**OPTIONS, **(LORA if len(adapters) > 1 else {}), "kv_cache_memory_bytes": 64 << 20}
    options |= {"tensor_parallel_size": num_workers, "fast_paths": "off", "enable_prefix_caching": False}
    core = make_core(folder, **options)
    results: dict[str, Result] = {}
    try:
        for number, fields in enumerate(asked):
            add(core, f"{number}", params=PARAMS, **fields)
            finish(core, results)
    finally:
        core.close()
    return asked, [results[f"{number}"] for number in range(len(asked))]


def _with_adapter(folder: Path) -> list[LoRARequest | None]:
    """Write a model, and an adapter of its recurrent and its other layers; returns none, and the adapter."""
    tiny_checkpoint(folder, "granitemoehybrid")
    modules = ["in_proj", "out_proj", "q_proj", "k_proj"]
    make_adapter(tiny_model("granitemoehybrid"), folder / "adapter", seed=1, r=4, target_modules=modules)
    return [None, request_of(1, folder / "adapter")]


def _check_schedules(engine: Engine, max_examples: int) -> None:
    @settings(
        max_examples=max_examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(moves=st.lists(MOVES, min_size=6, max_size=30))
    def holds(moves: list[tuple[str, int]]) -> None:
        engine.play(moves)

    try:
        holds()
    finally:
        engine.core.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("name", ["running_sum", *RECURRENT])
def test_every_request_has_the_bits_of_a_run_alone(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    if name == "running_sum":
        running_sum.register()
        write_checkpoint(tmp_path, running_sum.ARCHITECTURE)
    else:
        tiny_checkpoint(tmp_path, name)
    _check_schedules(Engine(tmp_path, options), 12)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.one_case_quick
@pytest.mark.one_path(reason="some of the engines have none")
def test_every_request_has_the_bits_of_its_adapter_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    _check_schedules(Engine(tmp_path, {**options, **LORA}, _with_adapter(tmp_path)), 3)


@pytest.mark.parametrize("options", [{"mamba_cache_dtype": "bfloat16"}, {"mamba_ssm_cache_dtype": "bfloat16"}], ids=str)
@pytest.mark.one_case_quick
def test_states_in_bfloat16_are_smaller_and_have_one_value_each(tmp_path: Path, options: dict[str, Any]) -> None:
    tiny_checkpoint(tmp_path, "granitemoehybrid")
    prompts, sizes, results = [PROMPTS[-1], PROMPTS[4]], [], []
    for more in ({}, {**options, "max_num_batched_tokens": 64}, {**options, "max_num_batched_tokens": 7, **NGRAM}):
        core = make_core(tmp_path, **OPTIONS, **more, kv_cache_memory_bytes=8 << 20)
        groups = core.kv_cache_config.groups
        sizes.append(max(group.spec.page_size_bytes for group in groups if isinstance(group.spec, RecurrentStateSpec)))
        results.append([run(core, prompts, PARAMS) for _ in range(2)])
        core.close()
    assert 0.5 * sizes[0] <= sizes[1] == sizes[2] < sizes[0]
    _, (whole, again), (cut, from_snapshots) = results
    for other in (again, cut, from_snapshots):
        assert_equal(other, whole)
    assert from_snapshots[0].num_cached_tokens > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=str)
@pytest.mark.one_path(reason="kills come between steps")
def test_requests_survive_the_kills_of_processes_at_any_time(tmp_path: Path, ranks: dict[str, int]) -> None:
    """Requests come, end early, and lose a core or a worker, in random order; pools have room for few of them."""
    adapters, rng = _with_adapter(tmp_path), random.Random(0)
    asked, alone = _asked_and_alone(tmp_path, adapters, ranks.get("tensor_parallel_size", 1))
    options = {**SMALL, **OPTIONS, **NGRAM, **LORA, **ranks}
    options |= {"kv_cache_memory_bytes": 512 << 10, "max_num_batched_tokens": 13}
    core = CoreGroup(EngineConfig.create(str(tmp_path), **options))
    kinds: list[int] = []
    results: dict[str, Result] = {}
    # The numbers of tokens after which a process is killed.
    kills = sorted(rng.sample(range(10, 120), 2))
    try:
        while len(kinds) < NUM_REQUESTS or core.has_unfinished_requests():
            if len(kinds) < NUM_REQUESTS and rng.random() < 0.5:
                # Some are the one before again, and some have a salt of their own, with which nothing is found.
                kinds.append(kinds[-1] if kinds and rng.random() < 0.3 else rng.randrange(len(asked)))
                req_id, fields = f"{len(kinds) - 1}", asked[kinds[-1]]
                salt = req_id if len(kinds) % 4 == 0 else None
                core.add_request(
                    EngineRequest(
                        req_id=req_id,
                        prompt_token_ids=fields["prompt"],
                        parts=fields["parts"],
                        sampling_params=PARAMS,
                        cache_salt=salt,
                    )
                )
            if kinds and rng.random() < 0.05:
                outputs = core.abort_requests([f"{rng.randrange(len(kinds))}"])
            else:
                outputs = core.step() if core.has_unfinished_requests() else []
            for output in outputs:
                results.setdefault(output.req_id, Result()).take(output)
            if kills and sum(len(result.tokens) for result in results.values()) > kills[0]:
                with suppress(ProcessLost):
                    os.kill(rng.choice(core.collective_rpc(RpcCall(process_id))), signal.SIGKILL)
                    del kills[0]
        assert not kills
        for number, kind in enumerate(kinds):
            _assert_as_alone(results[f"{number}"], alone[kind])
        wait_until(lambda: core.stats().num_used_blocks == 0)
    finally:
        core.close()


def process_id(worker: Any) -> int:
    return os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, NGRAM], ids=str)
def test_requests_go_on_from_computed_states_when_their_core_is_killed(tmp_path: Path, options: dict[str, Any]) -> None:
    tiny_checkpoint(tmp_path, "lfm2")
    _, alone = _asked_and_alone(tmp_path)
    options = {**SMALL, **OPTIONS, **options}
    core = CoreGroup(EngineConfig.create(str(tmp_path), **options), EngineCore)
    try:
        for is_killed in (True, False):
            results = {f"{number}": Result() for number in range(len(PROMPTS))}
            for number, prompt in enumerate(PROMPTS):
                core.add_request(EngineRequest(req_id=f"{number}", prompt_token_ids=prompt, sampling_params=PARAMS))
            while core.has_unfinished_requests():
                for output in core.step():
                    results[output.req_id].take(output)
                if is_killed and sum(len(result.tokens) for result in results.values()) > 40:
                    os.kill(core.process_ids[0], signal.SIGKILL)
                    is_killed = False
            assert_equal(list(results.values()), alone)
        assert any(result.num_cached_tokens > 0 for result in results.values())
    finally:
        core.close()
