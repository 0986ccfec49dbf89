"""A profile's trace: its name, its place, and what it says of every step."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.contract import CachedRequestData, NewRequestData, RpcCall, SamplingParams, SchedulerOutput
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ConfigError, LifecycleError
from penstock.worker.profiler import step_label
from support.checkpoints import tiny_checkpoint
from support.engines import greedy, make_core, random_prompts, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama")).folder


@pytest.fixture
def core(folder: Path, tmp_path: Path) -> Iterator[EngineCore]:
    core = make_core(folder, profiler_dir=tmp_path / "traces", enable_prefix_caching=False)
    yield core
    core.close()


def start(core: EngineCore, prefix: str | None = None) -> None:
    core.collective_rpc(RpcCall("profile", kwargs={"is_start": True, "profile_prefix": prefix}))


def stop(core: EngineCore) -> Path:
    (path,) = core.collective_rpc(RpcCall("profile", kwargs={"is_start": False}))
    return Path(path)


def events(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return found


def steps(path: Path) -> list[str]:
    named = [event for event in events(path) if str(event.get("name")).startswith("execute_context")]
    return [event["name"] for event in sorted(named, key=lambda event: event["ts"])]


def test_every_step_says_what_it_runs(core: EngineCore) -> None:
    """70 and 10 tokens in steps of at most 64: a chunk, its rest with the second prompt, then decodes."""
    start(core)
    run(core, random_prompts([70, 10], 97), greedy(3))
    path = stop(core)
    assert steps(path) == [
        "execute_context_1(64)_generation_0(0)",
        "execute_context_2(16)_generation_0(0)",
        "execute_context_0(0)_generation_2(2)",
        "execute_context_0(0)_generation_2(2)",
    ]
    assert any(event["name"].startswith("aten::") for event in events(path) if "name" in event)


def test_the_name_has_the_prefix_and_the_rank(core: EngineCore, tmp_path: Path) -> None:
    start(core, "warm")
    path = stop(core)
    assert path.parent == tmp_path / "traces"
    assert re.fullmatch(r"warm_pp0_tp0_rank0\.\d+\.pt\.trace\.json\.gz", path.name)
    start(core)
    assert re.fullmatch(r"pp0_tp0_rank0\.\d+\.pt\.trace\.json\.gz", stop(core).name)


def test_traces_of_several_engines_have_their_numbers(folder: Path, tmp_path: Path) -> None:
    core = make_core(folder, profiler_dir=tmp_path / "traces", data_parallel_size=2, data_parallel_rank=1)
    start(core)
    assert stop(core).name.startswith("dp1_pp0_tp0_rank0.")


def test_only_what_runs_between_start_and_stop_is_recorded(core: EngineCore) -> None:
    prompts = random_prompts([4], 97)
    run(core, prompts, greedy(2))
    start(core)
    run(core, prompts, greedy(3))
    first = stop(core)
    run(core, prompts, greedy(2))
    assert steps(first) == ["execute_context_1(4)_generation_0(0)", *["execute_context_0(0)_generation_1(1)"] * 2]


def test_steps_of_another_thread_are_recorded(core: EngineCore) -> None:
    start(core)
    thread = threading.Thread(target=run, args=(core, random_prompts([4], 97), greedy(2)))
    thread.start()
    thread.join()
    path = stop(core)
    assert len(steps(path)) == 2
    assert any(event["name"].startswith("aten::") for event in events(path) if "name" in event)


def test_options_say_what_is_recorded(folder: Path, tmp_path: Path) -> None:
    core = make_core(folder, profiler_dir=str(tmp_path), profiler_use_gzip=False, profiler_record_shapes=True)
    start(core)
    run(core, random_prompts([4], 97), greedy(2))
    path = stop(core)
    assert path.name.endswith(".pt.trace.json")
    assert any("Input Dims" in event.get("args", {}) for event in events(path))
    core.close()


def test_calls_out_of_turn_are_refused(core: EngineCore) -> None:
    with pytest.raises(LifecycleError, match="No profile is running: start_profile must come first"):
        stop(core)
    start(core)
    with pytest.raises(LifecycleError, match="A profile is running already"):
        start(core)
    stop(core)
    with pytest.raises(ConfigError, match="profile_prefix='a/b' is not valid"):
        start(core, "a/b")


def test_without_a_folder_profiling_is_refused_with_what_to_do(folder: Path) -> None:
    core = make_core(folder)
    for call in (start, stop):
        with pytest.raises(ConfigError, match="profiler_dir is not set. Start the engine with profiler_dir="):
            call(core)
    core.close()


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    core = make_core(folder, profiler_dir=tmp_path / "file" / "traces")
    with pytest.raises(ConfigError, match="profiler_dir=.* cannot be written to"):
        start(core)
    core.close()


def test_two_engines_cannot_be_profiled_at_once(core: EngineCore, folder: Path, tmp_path: Path) -> None:
    other = make_core(folder, profiler_dir=tmp_path)
    start(core)
    with pytest.raises(LifecycleError, match="torch's profiler is in use in this process"):
        start(other)
    stop(core)
    start(other)
    stop(other)
    other.close()


def test_closing_an_engine_writes_the_profile_that_runs(folder: Path, tmp_path: Path) -> None:
    core = make_core(folder, profiler_dir=tmp_path)
    start(core)
    run(core, random_prompts([4], 97), greedy(2))
    core.close()
    (path,) = tmp_path.iterdir()
    assert len(steps(path)) == 2


def test_a_request_that_comes_back_is_in_its_context_phase_until_its_tokens_are_computed() -> None:
    params = SamplingParams(seed=0)
    new = NewRequestData(
        req_id="new",
        prompt_token_ids=[1] * 5,
        prefill_token_ids=[1] * 9,
        sampling_params=params,
        block_ids=([1],),
        num_computed_tokens=2,
    )
    output = SchedulerOutput(
        step_id=0,
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=["chunk", "last", "decode", "unknown"],
            new_block_ids=[None] * 4,
            num_computed_tokens=[4, 9, 10, 3],
        ),
        num_scheduled_tokens={"new": 7, "chunk": 4, "last": 1, "decode": 1, "unknown": 1},
        total_num_scheduled_tokens=14,
    )
    label = step_label(output, {"chunk": 10, "last": 10, "decode": 10}.get)
    assert label == "execute_context_3(12)_generation_2(2)"


def test_the_cuda_profiler_records_steps_between_start_and_stop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.profiler.start", lambda: calls.append("start"))
    monkeypatch.setattr("torch.cuda.profiler.stop", lambda: calls.append("stop"))
    monkeypatch.setattr("torch.cuda.nvtx.range_push", calls.append)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: calls.append("pop"))
    core = make_core(folder, profiler="cuda")
    run(core, [[5, 6, 7]], greedy(2))
    core.collective_rpc(RpcCall("profile"))
    run(core, [[5, 6, 7]], greedy(2))
    assert core.collective_rpc(RpcCall("profile", kwargs={"is_start": False})) == [None]
    run(core, [[5, 6, 7]], greedy(2))
    core.close()
    assert calls[:3] == ["start", "execute_context_1(3)_generation_0(0)", "pop"]
    assert calls[3] == "execute_context_0(0)_generation_1(1)"
    assert calls.index("stop") == len(calls) - 1


def test_a_schedule_writes_a_trace_of_each_cycles_active_steps(folder: Path, tmp_path: Path) -> None:
    cycle = {"profiler_wait_iterations": 1, "profiler_active_iterations": 2}
    core = make_core(folder, profiler_dir=tmp_path, profiler_delay_iterations=1, profiler_repeat=2, **cycle)
    start(core)
    run(core, [[5, 6, 7]], greedy(3))
    assert core.collective_rpc(RpcCall("profile", kwargs={"is_start": False})) == [None], "no step was active"
    start(core)
    # A delay, two cycles of four steps with two active ones each, and a step after them.
    for length in range(1, 6):
        run(core, [[9] * length], greedy(2))
    last = stop(core)
    core.close()
    first, second = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert second == last
    decode = "execute_context_0(0)_generation_1(1)"
    assert steps(first) == [decode, "execute_context_1(3)_generation_0(0)"]
    assert steps(second) == [decode, "execute_context_1(5)_generation_0(0)"]


def test_the_cuda_profiler_follows_a_schedule(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.profiler.start", lambda: calls.append("start"))
    monkeypatch.setattr("torch.cuda.profiler.stop", lambda: calls.append("stop"))
    monkeypatch.setattr("torch.cuda.nvtx.range_push", calls.append)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: None)
    core = make_core(folder, profiler="cuda", profiler_active_iterations=2)
    core.collective_rpc(RpcCall("profile"))
    run(core, [[5, 6, 7]], greedy(6))
    core.collective_rpc(RpcCall("profile", kwargs={"is_start": False}))
    core.close()
    decode = "execute_context_0(0)_generation_1(1)"
    assert calls == ["start", decode, decode, "stop", "start", decode, decode, "stop"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profiler_active_iterations": -1}, "profiler_active_iterations=-1 is not valid"),
        ({"profiler_repeat": 2}, "profiler_repeat=2 needs profiler_active_iterations"),
        ({"profiler": "steps", "profiler_active_iterations": 2}, "not valid with profiler='steps'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.create("demo", **options)


def test_the_cuda_profiler_needs_a_gpu_and_takes_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    core = make_core(folder, profiler="cuda")
    with pytest.raises(ConfigError, match="profiler='cuda' needs a GPU"):
        core.collective_rpc(RpcCall("profile"))
    with pytest.raises(LifecycleError, match="No profile is running"):
        core.collective_rpc(RpcCall("profile", kwargs={"is_start": False}))
    core.close()
    with pytest.raises(ConfigError, match="not valid with profiler='cuda'"):
        make_core(folder, profiler="cuda", profiler_dir="traces")
    with pytest.raises(ConfigError, match="profiler='nsys' is not valid"):
        make_core(folder, profiler="nsys")
