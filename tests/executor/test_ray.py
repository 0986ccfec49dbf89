"""Workers on the nodes of a Ray cluster give the tokens of one worker, also when workers are lost."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ConfigError, LifecycleError, ModelError, WaitTimeout, WorkerError
from penstock.executor import create_executor
from penstock.executor.ray import RayExecutor
from penstock.executor.select import environment_of_core
from penstock.worker import WorkerBase
from support.arrangements import PARAMS, PROMPTS, VOCAB_SIZE, assert_same, some_steps
from support.checkpoints import tiny_checkpoint
from support.engines import Result, finish, make_core, run
from support.waiting import PATIENCE_S, is_running

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
LAYERS = 4
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": "2MiB", "max_model_len": 128, "num_threads": 2}


def place_of(worker: WorkerBase) -> tuple[int, tuple[int, int], int, int]:
    parallel = worker.parallel
    return worker.rank, parallel.place_on_machine, parallel.tensor.size, parallel.pipeline.rank


def sends_parts(worker: WorkerBase) -> bool:
    return worker.parallel.pipeline.sends_parts


def environment_of(worker: WorkerBase) -> tuple[str | None, ...]:
    return tuple(map(os.environ.get, ("PENSTOCK_CPU_KERNELS", "OMP_NUM_THREADS", "NCCL_ASYNC_ERROR_HANDLING", "OTHER")))


def sum_of_ranks(worker: WorkerBase) -> list[int]:
    return worker.parallel.tensor.gather_values(worker.rank)


def failing(worker: WorkerBase) -> None:
    raise ModelError(f"rank {worker.rank} says no")


def failing_on_last(worker: WorkerBase) -> int:
    if worker.rank == 1:
        raise ZeroDivisionError("of all things")
    return worker.rank


def sleeping_on_last(worker: WorkerBase, duration_s: float) -> None:
    if worker.rank == 1:
        time.sleep(duration_s)


def failing_in_next_step(worker: WorkerBase) -> None:
    if worker.rank == 1:
        worker.runner.model_state.inputs = lambda batch: 1 / 0  # type: ignore[attr-defined]


def computing_in_next_step(worker: WorkerBase, duration_s: float) -> None:
    def compute() -> None:
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            pass

    before_next_step(worker, compute)


def sleeping_in_next_step(worker: WorkerBase, duration_s: float) -> None:
    before_next_step(worker, lambda: time.sleep(duration_s))


def before_next_step(worker: WorkerBase, do: Callable[[], None]) -> None:
    """On the last rank, once."""
    if worker.rank != 1:
        return
    state = worker.runner.model_state  # type: ignore[attr-defined]
    inputs = state.inputs

    def changed(batch: Any) -> Any:
        state.inputs = inputs
        do()
        return inputs(batch)

    state.inputs = changed


@pytest.fixture(scope="module")
def start_cluster() -> Iterator[Callable[..., None]]:
    """Nodes with so many workers each, unless there are such; what there was before ends."""
    import ray
    from ray.cluster_utils import Cluster

    clusters: list[Any] = []
    there: tuple[int, ...] = ()
    # Ray lets its workers stand behind everything else on the machine, such as other tests.
    changed = pytest.MonkeyPatch()
    changed.setenv("RAY_worker_niceness", "0")

    def end() -> None:
        ray.shutdown()
        while clusters:
            clusters.pop().shutdown()

    def start(*sizes: int) -> None:
        nonlocal there
        if sizes == there:
            return
        end()
        there = sizes
        memory = {"object_store_memory": 80 << 20}
        first = {"num_cpus": sizes[0], "include_dashboard": False, **memory}
        clusters.append(Cluster(initialize_head=True, head_node_args=first))
        for size in sizes[1:]:
            clusters[-1].add_node(num_cpus=size, **memory)
        ray.init(address=clusters[-1].address, log_to_driver=False)

    yield start
    end()
    changed.undo()


@pytest.fixture
def two_nodes(start_cluster: Callable[..., None]) -> None:
    start_cluster(1, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder, vocab_size=VOCAB_SIZE, head_dim=16, num_hidden_layers=LAYERS)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[Result]:
    core = make_core(folder, **OPTIONS)
    try:
        return run(core, PROMPTS, PARAMS)
    finally:
        core.close()


@pytest.fixture(scope="module")
def config(folder: Path) -> EngineConfig:
    return EngineConfig.create(
        str(folder), device="cpu", tensor_parallel_size=2, distributed_executor_backend="ray", **OPTIONS
    )


def executor_of(core: EngineCore) -> RayExecutor:
    assert isinstance(core._executor, RayExecutor)
    return core._executor


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., EngineCore]]:
    """Makes engines of which nothing may be left."""
    cores: list[EngineCore] = []
    pids: list[int] = []

    def make_one(ranks: int, stages: int, **options: Any) -> EngineCore:
        arrangement = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
        cores.append(make_core(folder, distributed_executor_backend="ray", **{**OPTIONS, **arrangement, **options}))
        pids.extend(executor_of(cores[-1]).process_ids)
        return cores[-1]

    yield make_one
    for core in cores:
        pids.extend(executor_of(core).process_ids)
        core.close()
    assert_nothing_is_left(pids)


def assert_nothing_is_left(pids: list[int]) -> None:
    import ray

    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        free = ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]
        if not groups and free and not any(map(is_running, pids)):
            return
        time.sleep(0.1)
    raise AssertionError(f"left: {groups}, {list(filter(is_running, pids))}, {ray.available_resources()}")


def test_workers_on_two_nodes_are_asked_and_fail_as_processes_do(
    two_nodes: None, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CPU_KERNELS", "avx2")
    monkeypatch.setenv("OTHER", "of this machine")
    executor = create_executor(config)
    assert isinstance(executor, RayExecutor)
    # On both nodes, each of which one has to itself, with as many threads as asked for.
    assert executor.collective_rpc(RpcCall(place_of)) == [(0, (0, 1), 2, 0), (1, (0, 1), 2, 0)]
    assert executor.collective_rpc(RpcCall(sum_of_ranks)) == [[0, 1], [0, 1]]
    assert executor.collective_rpc(RpcCall(environment_of)) == [("avx2", "2", None, None)] * 2
    with pytest.raises(ModelError, match=r"^rank [01] says no$"):
        executor.collective_rpc(RpcCall(failing))
    with pytest.raises(ConfigError, match="has no method 'dance'"):
        executor.collective_rpc(RpcCall("dance"))
    named = rf"waited 3 s in sleeping_on_last for rank 1 \(process {executor.process_ids[1]} on node [0-9.]+\)\.$"
    with pytest.raises(WaitTimeout, match=named):
        executor.collective_rpc(RpcCall(sleeping_on_last, (6.0,), timeout_s=3))
    assert executor.collective_rpc(RpcCall(sum_of_ranks)) == [[0, 1], [0, 1]]
    executor.check_health()
    with pytest.raises(WorkerError, match="Rank 1 failed in failing_on_last: ZeroDivisionError: of all things"):
        executor.collective_rpc(RpcCall(failing_on_last))
    with pytest.raises(WorkerError, match="Rank 1 failed in failing_on_last, and 1 of 2 ranks did not"):
        executor.check_health()
    assert executor.why_not_restart() is None
    executor.shutdown()
    with pytest.raises(LifecycleError, match="shut down"):
        executor.collective_rpc(RpcCall(place_of))
    assert_nothing_is_left(executor.process_ids)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_two_nodes_give_the_tokens_of_one_worker_though_an_actor_is_killed(
    ranks: int,
    stages: int,
    two_nodes: None,
    make: Callable[..., EngineCore],
    undisturbed: list[Result],
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = make(ranks, stages)
    assert_same(run(core, PROMPTS, PARAMS), undisturbed)
    before = executor_of(core).process_ids
    results = some_steps(core)
    os.kill(before[1], signal.SIGKILL)
    finish(core, results)
    after = executor_of(core).process_ids
    assert not set(before) & set(after)
    assert_same([results[f"r{index}"] for index in range(len(PROMPTS))], undisturbed)
    assert any(f"Rank 1 (process {before[1]} on node" in record.message for record in caplog.records)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "failing"])
def test_requests_go_on_when_an_actor_hangs_or_fails(
    how: str,
    two_nodes: None,
    make: Callable[..., EngineCore],
    undisturbed: list[Result],
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = make(2, 1, step_timeout_s=8.0)
    before = executor_of(core).process_ids
    results = some_steps(core)
    if how == "stopped":
        os.kill(before[1], signal.SIGSTOP)
    else:
        core.collective_rpc(RpcCall(failing_in_next_step))
    finish(core, results)
    assert_same([results[f"r{index}"] for index in range(len(PROMPTS))], undisturbed)
    cause = (
        rf"waits in step \d+ for rank 1 \(process {before[1]} .* Workers make no progress for 8 s"
        if how == "stopped"
        else "Rank 1 failed in execute_model: ZeroDivisionError"
    )
    assert any(re.search(cause, record.message) for record in caplog.records)


@pytest.mark.slow
def test_steps_may_take_longer_while_workers_compute_and_a_worker_that_others_wait_for_is_named(
    two_nodes: None, make: Callable[..., EngineCore], undisturbed: list[Result], caplog: pytest.LogCaptureFixture
) -> None:
    core = make(2, 1, step_timeout_s=4.0)
    before = executor_of(core).process_ids
    results = some_steps(core)
    core.collective_rpc(RpcCall(computing_in_next_step, (8.0,)))
    # The result of a step is read behind the next one's start.
    for _ in range(3):
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
    assert executor_of(core).process_ids == before
    core.collective_rpc(RpcCall(sleeping_in_next_step, (60.0,)))
    finish(core, results)
    assert_same([results[f"r{index}"] for index in range(len(PROMPTS))], undisturbed)
    named = rf"waits in step \d+ for rank 1 \(process {before[1]} .* \(beside rank 0 .* make no progress for 4 s"
    assert any(re.search(named, record.message) for record in caplog.records)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "ranks", "stages"), [((2, 2), 2, 2), ((1, 1, 1), 1, 3), ((3, 1), 2, 2)], ids=str)
def test_more_arrangements_give_the_tokens_of_one_worker(
    sizes: tuple[int, ...],
    ranks: int,
    stages: int,
    start_cluster: Callable[..., None],
    make: Callable[..., EngineCore],
    undisturbed: list[Result],
) -> None:
    start_cluster(*sizes)
    core = make(ranks, stages, num_threads=ranks * stages)
    assert_same(run(core, PROMPTS, PARAMS), undisturbed)
    places = core.collective_rpc(RpcCall(place_of))
    assert all(core.collective_rpc(RpcCall(sends_parts)))
    if sizes == (2, 2):
        assert [place for _, place, _, _ in places] == [(0, 2), (1, 2)] * 2


def test_a_core_in_a_process_of_its_own_is_told_the_cluster(two_nodes: None, config: EngineConfig) -> None:
    import ray

    assert environment_of_core(config) == {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    here = EngineConfig.create(config.model.model, device="cpu", tensor_parallel_size=2)
    assert environment_of_core(here) == {}


def node_of(worker: WorkerBase) -> tuple[str, tuple[int, int], int]:
    import ray

    return ray.get_runtime_context().get_node_id(), worker.parallel.place_on_machine, os.getpid()


@pytest.mark.slow
def test_engines_side_by_side_have_a_node_each_and_go_on_when_a_worker_or_a_core_is_killed(two_nodes: None) -> None:
    prompts, params = [f"{name}:" for name in ("ROMEO", "JULIET", "NURSE", "TYBALT")], SamplingParams(temperature=0.0)

    def texts(llm: LLM) -> list[str]:
        return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]

    options: dict[str, Any] = {"kv_cache_memory_bytes": "8MiB", "num_threads": 2}
    with LLM("demo", **options) as llm:
        expected = texts(llm)
    with LLM("demo", data_parallel_size=2, distributed_executor_backend="ray", **options) as llm:
        assert texts(llm) == expected
        first, second = llm.collective_rpc(node_of)
        assert first[0] != second[0]
        # There is no room for the other one's worker.
        assert first[1] == second[1] == (0, 1)
        os.kill(second[2], signal.SIGKILL)
        assert texts(llm) == expected
        core = psutil.Process(llm._session._core.process_ids[0])  # type: ignore[attr-defined]
        core.kill()
        assert texts(llm) == expected
        pids = [pid for *_, pid in llm.collective_rpc(node_of)]
    assert not {first[2], second[2]} & set(pids)
    assert_nothing_is_left([first[2], second[2], *pids])


def test_a_cluster_without_room_is_told(two_nodes: None, folder: Path) -> None:
    config = EngineConfig.create(
        str(folder), device="cpu", tensor_parallel_size=4, distributed_executor_backend="ray", num_threads=4
    )
    with pytest.raises(ConfigError, match=r"4 workers, for tensor_parallel_size=4 .* has 2 nodes \(CPU 1; CPU 1\)"):
        create_executor(config)
