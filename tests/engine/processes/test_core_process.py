"""A core in another process behaves as one in this process does, and its final death ends every wait."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.config import EngineConfig
from penstock.contract import ContractVersionError, RpcCall, SamplingParams, SchedulerOutput, codec
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.core.core_client import CoreClient
from penstock.engine.messages import EngineRequest
from penstock.engine.processes.core_group import CoreGroup
from penstock.engine.session import Session
from penstock.errors import (
    ConfigError,
    ContextTooLong,
    EngineDead,
    LifecycleError,
    RemoteError,
    WaitTimeout,
    WorkerError,
)
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from support.fake_engine import FakeCore, load_fake_core, write_model
from support.threads import num_threads
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.fresh_interpreters
PARAMS = SamplingParams(max_tokens=6, seed=5)


def refusing(config: EngineConfig) -> FakeCore:
    core = FakeCore(config)
    core.refuses = lambda request: request.prompt_token_ids[-1] == 12
    return core


def failing_step(step: int) -> None:
    if step == 3:
        raise EngineDead("workers failed four times") from WorkerError(
            "rank 1 is gone", method="execute_model", rank=1, cause_type="RuntimeError"
        )


def of_another_version(config: EngineConfig) -> FakeCore:
    codec.CONTRACT_VERSION += 1
    return FakeCore(config)


def dying(config: EngineConfig) -> FakeCore:
    core = FakeCore(config)
    core.on_step = failing_step
    return core


def hanging(config: EngineConfig) -> FakeCore:
    core = FakeCore(config)
    core.on_step = lambda step: time.sleep(3600)
    return core


def slow(config: EngineConfig) -> FakeCore:
    core = FakeCore(config)
    core.on_step = lambda step: time.sleep(0.02)
    return core


def recording(config: EngineConfig) -> FakeCore:
    core = FakeCore(config)
    output = SchedulerOutput(step_id=0, num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1)

    def record(step: int) -> None:
        time.sleep(0.02)
        core.step_log.launched = output

    core.on_step = record
    return core


def not_starting(config: EngineConfig) -> FakeCore:
    raise ConfigError("out of luck") from ZeroDivisionError("of all things")


def killed_while_starting(config: EngineConfig) -> FakeCore:
    os._exit(7)


def never_starting(config: EngineConfig) -> FakeCore:
    time.sleep(3600)
    raise AssertionError


def process_id(core: FakeCore) -> int:
    return os.getpid()


def by_zero(core: FakeCore, number: int) -> float:
    return number / 0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig.create(str(write_model(tmp_path_factory.mktemp("model"))), max_restarts=0)


@pytest.fixture
def start(config: EngineConfig) -> Iterator[Callable[..., CoreGroup]]:
    """Start core groups, and close them after the test."""
    started = []

    def start_one(load_core: Callable[[EngineConfig], FakeCore] = load_fake_core, **options: Any) -> CoreGroup:
        started.append(CoreGroup(replace(config, parallel=replace(config.parallel, **options)), load_core))
        return started[-1]

    yield start_one
    for core in started:
        core.close()
        assert not any(psutil.pid_exists(pid) for pid in core.process_ids)


def request(req_id: str = "a", **fields: Any) -> EngineRequest:
    return EngineRequest(**{"req_id": req_id, "prompt_token_ids": [9, 10], "sampling_params": PARAMS, **fields})


def run(core: CoreClient) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            outputs.setdefault(output.req_id, []).append(output)
    return outputs


def kill(core: CoreGroup) -> None:
    os.kill(core.process_ids[0], signal.SIGKILL)


def test_outputs_are_those_of_a_core_in_this_process(config: EngineConfig, start: Callable[..., CoreGroup]) -> None:
    cores: list[CoreClient] = [FakeCore(config), start()]
    outputs = []
    for core in cores:
        for seed in range(4):
            params = SamplingParams(max_tokens=5 + seed, seed=seed, logprobs=seed or None, stop_token_ids=[77])
            core.add_request(request(f"r{seed}", sampling_params=params, eos_token_ids=frozenset({1, 2})))
        outputs.append(run(core))
    assert outputs[0] == outputs[1]
    assert (cores[0].max_model_len, cores[0].vocab_size) == (cores[1].max_model_len, cores[1].vocab_size)


def test_an_offline_engine_over_it_gives_the_same(config: EngineConfig, start: Callable[..., CoreGroup]) -> None:
    results = []
    for core in (FakeCore(config), start()):
        session = Session(config, load_core=lambda config, core=core: core)  # type: ignore[misc]
        params = [PARAMS, SamplingParams(max_tokens=4, n=3, seed=1), SamplingParams(max_tokens=30, stop=["a"])]
        requests = [session.accept([9, 10 + index], one) for index, one in enumerate(params)]
        finished = [progress for progress in session.run(requests) if progress.finished]
        results.append(
            {
                one.req_id: [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in one.output().outputs]
                for one in finished
            }
        )
        assert not core.has_unfinished_requests()
        session.close()
    assert results[0] == results[1]


def test_an_async_engine_over_it_gives_the_same(config: EngineConfig) -> None:
    async def collect(engine: AsyncEngine, first: int) -> list[int]:
        outputs = [output async for output in engine.generate({"prompt_token_ids": [first, 10]}, PARAMS)]
        return outputs[-1].outputs[0].token_ids

    async def serve(load_core: Callable[[EngineConfig], CoreClient]) -> list[list[int]]:
        async with AsyncEngine.from_config(config, load_core) as engine:
            results = await asyncio.gather(*(collect(engine, 9 + index) for index in range(5)))
            left = engine.generate([9, 10], SamplingParams(max_tokens=50))
            await anext(left)
            await left.aclose()
            assert await engine.reset_prefix_cache(reset_running_requests=True)
            return results

    in_process = asyncio.run(serve(load_fake_core))
    assert asyncio.run(serve(lambda config: CoreGroup(config, load_fake_core))) == in_process


def test_what_the_core_refuses_is_raised_with_its_type_and_others_are_served(
    start: Callable[..., CoreGroup],
) -> None:
    core = start(refusing)
    core.add_request(request("a"))
    with pytest.raises(ContextTooLong, match=r"^The cache is too small for this one\.$"):
        core.add_request(request("b", prompt_token_ids=[9, 12]))
    assert list(run(core)) == ["a"]


def test_a_request_that_is_aborted_leaves_nothing_behind_and_its_id_is_free(start: Callable[..., CoreGroup]) -> None:
    core = start(slow)
    for _ in range(5):
        core.add_request(request("a", sampling_params=SamplingParams(max_tokens=50, seed=1)))
        core.add_request(request("b"))
        core.step()
        # While this is answered, steps go on.
        (ended,) = core.abort_requests(["a", "unknown"])
        assert (ended.req_id, ended.finish_reason) == ("a", FinishReason.ABORT)
        core.add_request(request("a"))
        tokens = {name: [t for output in got for t in output.new_token_ids] for name, got in run(core).items()}
        assert tokens["a"] == tokens["b"] or tokens["b"] == tokens["a"][1:]
        assert len(tokens["a"]) == 6


def test_a_core_whose_last_request_was_aborted_reports_that_it_is_idle(start: Callable[..., CoreGroup]) -> None:
    core = start(recording)
    core.watch_steps(60.0)
    core.add_request(request("a", sampling_params=SamplingParams(max_tokens=50, seed=1)))
    num_steps, num_records = 0, 0
    while num_steps < 5:
        num_steps += len(core.step())
    assert core.status().stats.num_running_reqs == 1
    core.abort_requests(["a"])
    deadline = time.monotonic() + PATIENCE_S
    while core.status().stats.num_running_reqs or num_records < num_steps:
        assert time.monotonic() < deadline, (core.status().stats, num_steps, num_records)
        core.step()
        num_records += len(core.take_recent_steps()[0])


def test_utility_calls_reach_it_between_steps(start: Callable[..., CoreGroup]) -> None:
    core = start(slow)
    core.check_health()
    assert core.reset_prefix_cache()
    core.add_request(request())
    assert not core.reset_prefix_cache()
    assert core.collective_rpc(RpcCall(process_id)) == core.process_ids
    with pytest.raises(RemoteError, match="ZeroDivisionError: division by zero"):
        core.collective_rpc(RpcCall(by_zero, (1,)))
    assert len(run(core)["a"]) == 6


def test_messages_larger_than_the_pipe_do_not_block_both_sides(start: Callable[..., CoreGroup]) -> None:
    core = start()
    for index in range(4):
        core.add_request(request(f"r{index}", prompt_token_ids=[200_000] * 500_000))
    # Outputs that the client does not read while it adds requests do not keep the core from answering.
    params = SamplingParams(max_tokens=None, logprobs=20, seed=1)
    for index in range(40):
        core.add_request(request(f"s{index}", sampling_params=params))
    assert len(run(core)) == 44


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_process_that_is_killed_is_noticed(start: Callable[..., CoreGroup], is_waiting: bool) -> None:
    core = start(hanging)
    core.add_request(request())
    if is_waiting:
        threading.Timer(0.3, kill, [core]).start()
    else:
        kill(core)
        time.sleep(0.3)
    with pytest.raises(
        EngineDead, match=rf"process {core.process_ids[0]}, was killed by signal 9 \(SIGKILL\) while it served"
    ):
        run(core)
    with pytest.raises(EngineDead, match="SIGKILL"):
        core.add_request(request("b"))
    assert core.abort_requests(["a"]) == []


def test_an_idle_process_that_is_killed_fails_the_next_call(start: Callable[..., CoreGroup]) -> None:
    core = start()
    kill(core)
    with pytest.raises(EngineDead, match="SIGKILL.* while it served"):
        core.check_health()


def test_readers_of_a_killed_core_get_its_end(config: EngineConfig) -> None:
    core = CoreGroup(config, hanging)

    async def serve() -> None:
        async with AsyncEngine.from_config(config, lambda config: core) as engine:
            reader = asyncio.create_task(anext(engine.generate([9, 10], PARAMS)))
            await asyncio.sleep(0.2)
            kill(core)
            with pytest.raises(EngineDead, match="SIGKILL"):
                await asyncio.wait_for(reader, PATIENCE_S)

    asyncio.run(serve())


def test_a_core_that_fails_for_good_raises_with_the_cause(start: Callable[..., CoreGroup]) -> None:
    core = start(dying)
    core.add_request(request())
    with pytest.raises(EngineDead, match="^workers failed four times$") as raised:
        run(core)
    cause = raised.value.__cause__
    assert isinstance(cause, WorkerError)
    assert (cause.method, cause.rank) == ("execute_model", 1)
    with pytest.raises(EngineDead, match="four times"):
        core.check_health()


def test_a_core_that_hangs_is_not_waited_for_forever(start: Callable[..., CoreGroup]) -> None:
    core = start(hanging, step_timeout_s=0.5)
    core.add_request(request())
    begin = time.monotonic()
    expected = f"Process {os.getpid()} waited 0.5 s in step for the core in process {core.process_ids[0]}, which hangs"
    with pytest.raises(EngineDead, match=expected) as raised:
        run(core)
    assert 0.5 < time.monotonic() - begin < PATIENCE_S
    assert isinstance(raised.value.__cause__, WaitTimeout)
    with pytest.raises(EngineDead, match=r"waited 0.5 s in step"):
        core.check_health()


def test_a_call_may_take_longer_than_a_step_unless_it_has_a_limit(start: Callable[..., CoreGroup]) -> None:
    def sleeping(core: FakeCore) -> str:  # sent by value: the core does not import this module, which may take longer
        time.sleep(1.0)
        return "awake"

    core = start(step_timeout_s=0.5)
    with pytest.raises(WaitTimeout, match=r"waited 0.2 s in collective_rpc for the core"):
        core.collective_rpc(RpcCall(sleeping, timeout_s=0.2))
    assert core.collective_rpc(RpcCall(sleeping)) == ["awake"]


def test_what_a_core_that_stands_still_does_not_read_is_not_waited_for_forever(start: Callable[..., CoreGroup]) -> None:
    core = start(step_timeout_s=0.5)
    os.kill(core.process_ids[0], signal.SIGSTOP)
    # It is larger than the pipe's buffer; a part of it was sent, and no other message can follow.
    with pytest.raises(EngineDead, match=r"waited 0.5 s in add_request for the core"):
        core.add_request(request("b", prompt_token_ids=[7] * 5_000_000))


@pytest.mark.slow
def test_what_keeps_a_core_from_starting_is_raised(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="out of luck") as raised:
        CoreGroup(config, not_starting)
    assert str(raised.value.__cause__) == "ZeroDivisionError: of all things"
    with pytest.raises(EngineDead, match="ended with exit code 7 while it started"):
        CoreGroup(config, killed_while_starting)
    with pytest.raises(ContractVersionError, match="Run the same version of Penstock on both sides"):
        CoreGroup(config, of_another_version)
    with pytest.raises(WaitTimeout, match="waited 0.5 s in start for the core"):
        CoreGroup(config, never_starting, start_timeout_s=0.5)
    assert not [child for child in psutil.Process().children() if "core_server" in " ".join(child.cmdline())]


def test_closing_gives_process_thread_and_pipe_back(config: EngineConfig) -> None:
    CoreGroup(config, load_fake_core).close()
    this = psutil.Process()
    before = this.num_threads(), this.num_fds()
    core = CoreGroup(config, load_fake_core)
    core.add_request(request())
    core.close()
    core.close()
    assert not psutil.pid_exists(core.process_ids[0])
    # Before, a thread of the first core may still have been counted.
    assert num_threads(before[0]) <= before[0]
    assert this.num_fds() <= before[1]
    with pytest.raises(LifecycleError, match="closed"):
        core.step()


def test_a_client_that_dies_takes_the_core_along(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    code = f"""
import os
from penstock.config import EngineConfig
from penstock.engine.processes.core_group import CoreGroup
from support.fake_engine import load_fake_core
if __name__ == "__main__":
    core = CoreGroup(EngineConfig.create({str(model)!r}), load_fake_core)
    print(core.process_ids[0], flush=True)
    os._exit(0)
"""
    script = tmp_path / "client.py"
    script.write_text(code)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    wait_until(lambda: not psutil.pid_exists(int(done.stdout)), "the core ends with its client")
