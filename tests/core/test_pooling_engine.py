"""An engine whose forward passes end in pooled hidden states: the same loop, and not one token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.contract import (
    ArrayBytes,
    FullAttentionSpec,
    PooledOutput,
    RpcCall,
    SamplingInput,
    SamplingParams,
    SchedulerOutput,
)
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.session import Session
from penstock.errors import WorkerError
from penstock.executor import Executor
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.worker.memory_plan import MemoryPlan
from support.engines import add, random_prompts
from support.fake_engine import write_model

PROMPTS = random_prompts((5, 37, 1, 40, 13), 300, seed=5)


def pooled_of(prompt: Sequence[int]) -> ArrayBytes:
    """The mean token and the length: it takes the whole prompt, whatever its chunks."""
    return ArrayBytes.of([sum(prompt) / len(prompt), float(len(prompt))])


class PooledHandle:
    def __init__(self, output: PooledOutput) -> None:
        self.output, self.step_id = output, output.step_id

    def get_output(self, timeout_s: float = 1.0) -> PooledOutput:
        return self.output


class PoolingExecutor(Executor):
    """Sums prompts up, chunk by chunk. failing_step: in which its workers die, once. broken: prompts, by length."""

    made: list[PoolingExecutor]
    failing_step: int | None
    broken: set[int]

    def __init__(self, config: EngineConfig) -> None:
        self.block_size = config.cache.block_size
        self.prompts: dict[str, list[int]] = {}
        self.seen: dict[str, list[int]] = {}
        self.pending: dict[int, SchedulerOutput] = {}
        self.num_steps = 0
        self.made.append(self)

    def collective_rpc(self, call: RpcCall) -> list[Any]:
        if call.name == "get_kv_cache_spec":
            spec = FullAttentionSpec(block_size=self.block_size, num_kv_heads=1, head_size=4, dtype="float32")
            return [{"layer.0": spec}]
        if call.name == "determine_available_memory":
            return [MemoryPlan(total=1 << 20, free_at_start=1 << 20, fraction=0.5, terms=())]
        if call.name == "features_of_model":
            return [()]
        assert call.name in ("initialize_from_config", "compile_or_warm_up_model")
        return [None]

    @property
    def overlaps_with_host(self) -> bool:
        return False

    def execute_model(self, output: SchedulerOutput) -> None:
        self.num_steps += 1
        for req_id in output.finished_req_ids | output.preempted_req_ids:
            self.prompts.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            assert new.num_computed_tokens == 0, "hidden states of cached tokens are not there to be pooled"
            self.prompts[new.req_id], self.seen[new.req_id] = new.prompt_token_ids, []
        if output.step_id == type(self).failing_step:
            type(self).failing_step = None
            raise WorkerError("gone", method="execute_model", rank=0, cause_type="RuntimeError")
        self.pending[output.step_id] = output

    def sample_tokens(self, sampling: SamplingInput) -> PooledHandle:
        output = self.pending.pop(sampling.step_id)
        req_ids = list(output.num_scheduled_tokens)
        return PooledHandle(
            PooledOutput(
                step_id=output.step_id,
                req_ids=req_ids,
                pooled=[self._pool(req_id, output.num_scheduled_tokens[req_id]) for req_id in req_ids],
                errors={req_id: "not finite" for req_id in req_ids if len(self.prompts[req_id]) in self.broken},
            )
        )

    def _pool(self, req_id: str, num_tokens: int) -> ArrayBytes | None:
        prompt, seen = self.prompts[req_id], self.seen[req_id]
        seen += prompt[len(seen) : len(seen) + num_tokens]
        return pooled_of(seen) if len(seen) == len(prompt) else None

    def check_health(self) -> None: ...

    def why_not_restart(self) -> str | None:
        return None

    def shutdown(self) -> None: ...


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> list[PoolingExecutor]:
    made: list[PoolingExecutor] = []
    for name, value in {"made": made, "failing_step": None, "broken": set()}.items():
        monkeypatch.setattr(PoolingExecutor, name, value, raising=False)
    monkeypatch.setattr("penstock.engine.core.startup.create_executor", PoolingExecutor)
    return made


def config_of(folder: Path, **options: Any) -> EngineConfig:
    options = {"output_head": "mean", "block_size": 4, "kv_cache_memory_bytes": 1 << 16, **options}
    return EngineConfig.create(str(write_model(folder)), **options)


def pool(core: EngineCore, prompts: Sequence[Sequence[int]]) -> dict[str, EngineCoreOutput]:
    for index, prompt in enumerate(prompts):
        add(core, f"r{index}", prompt, SamplingParams(seed=0))
    outputs: dict[str, EngineCoreOutput] = {}
    for _ in range(1000):
        if not core.has_unfinished_requests():
            return outputs
        for output in core.step():
            assert output.req_id not in outputs, "a request was answered twice"
            outputs[output.req_id] = output
    raise AssertionError("it does not end")


@pytest.mark.parametrize("max_num_batched_tokens", [7, 512])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_request_ends_with_what_its_prompt_came_to(
    tmp_path: Path, executors: list[PoolingExecutor], async_scheduling: bool, max_num_batched_tokens: int
) -> None:
    options = {"async_scheduling": async_scheduling, "max_num_batched_tokens": max_num_batched_tokens}
    core = EngineCore(config_of(tmp_path, **options))
    # Twice, as cached prefixes must not change it.
    for _ in range(2):
        outputs = pool(core, PROMPTS)
        assert [outputs[f"r{index}"].pooled for index in range(len(PROMPTS))] == [*map(pooled_of, PROMPTS)]
        assert {output.finish_reason for output in outputs.values()} == {FinishReason.STOP}
        assert not any(output.new_token_ids for output in outputs.values())
    core.step()
    core.step()
    assert core.scheduler.kv_cache.num_used_blocks == 0
    assert not executors[0].pending


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("failing_step", [0, 2, 5])
def test_a_worker_that_dies_costs_no_answer(
    tmp_path: Path,
    executors: list[PoolingExecutor],
    monkeypatch: pytest.MonkeyPatch,
    async_scheduling: bool,
    failing_step: int,
) -> None:
    monkeypatch.setattr(PoolingExecutor, "failing_step", failing_step)
    core = EngineCore(config_of(tmp_path, async_scheduling=async_scheduling, max_num_batched_tokens=7))
    outputs = pool(core, PROMPTS)
    assert [outputs[f"r{index}"].pooled for index in range(len(PROMPTS))] == [*map(pooled_of, PROMPTS)]
    assert len(executors) == 2


def test_one_that_fails_is_told_and_the_others_are_answered(
    tmp_path: Path, executors: list[PoolingExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PoolingExecutor, "broken", {37})
    outputs = pool(EngineCore(config_of(tmp_path)), PROMPTS)
    assert (outputs["r1"].finish_reason, outputs["r1"].error, outputs["r1"].pooled) == ("error", "not finite", None)
    assert [outputs[f"r{index}"].pooled for index in (0, 2, 3, 4)] == [pooled_of(PROMPTS[i]) for i in (0, 2, 3, 4)]


def test_callers_of_an_offline_engine_get_it_in_their_outputs(tmp_path: Path, executors: list[PoolingExecutor]) -> None:
    session = Session(config_of(tmp_path, max_num_batched_tokens=7))
    requests = [session.accept(prompt, SamplingParams()) for prompt in PROMPTS]
    outputs = {progress.req_id: progress.output() for progress in session.run(requests) if progress.finished}
    session.close()
    results = [outputs[accepted.request.req_id] for accepted in requests]
    assert [output.pooled for output in results] == [pooled_of(prompt).to_numpy().tolist() for prompt in PROMPTS]
    assert [output.outputs[0].token_ids for output in results] == [[]] * len(PROMPTS)
    assert all(output.metrics.num_generated_tokens == 0 for output in results)
    assert all(output.metrics.finished_time is not None for output in results)
