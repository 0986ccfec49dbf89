"""Failures and calls of cores at odd moments: no request hangs, or ends because of another."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.config import EngineConfig
from penstock.contract import RpcCall, SamplingParams
from penstock.device.limits import MemoryLimit
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.messages import EngineRequest
from penstock.engine.processes import core_group
from penstock.engine.processes.core_group import CoreGroup
from penstock.errors import InvalidRequest, OutOfMemory, PenstockError, ProcessLost, RemoteError
from penstock.executor.processes import ProcessStarter
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from support.checkpoints import tiny_checkpoint
from support.engines import SMALL
from support.fake_engine import FakeCore, write_model
from support.leftovers import nothing_left
from support.waiting import wait_until

POISON, SILENT = 13, 14
LIMIT_S = 30.0


class OddCore(FakeCore):
    """Core without output for silent requests; dies of three requests if one is poison, and refuses those with 12."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.refuses = lambda request: request.prompt_token_ids[0] == 12

    def step(self) -> list[EngineCoreOutput]:
        time.sleep(0.005)
        kinds = [request.prompt_token_ids[0] for request, _ in self.running.values()]
        if POISON in kinds:
            if len(kinds) >= 3:
                os._exit(3)
            # While it is present, no request makes progress.
            return []
        silent = {name: self.running.pop(name) for name, (one, _) in list(self.running.items()) if is_silent(one)}
        outputs = super().step()
        self.running |= silent
        return outputs


def is_silent(request: EngineRequest) -> bool:
    return request.prompt_token_ids[0] == SILENT and Path(os.environ["PENSTOCK_TEST_SILENCE"]).exists()


def load_odd(config: EngineConfig) -> OddCore:
    return OddCore(config)


def load_at_its_end(config: EngineConfig) -> OddCore:
    raise EOFError("the file is too short")


class OddError(PenstockError):
    """Error with a text and a number that no message can hold."""

    def __init__(self) -> None:
        super().__init__("no such file: \udcff")
        self.name, self.number = "\udcff", 1 << 70


def raising_odd(core: FakeCore) -> None:
    raise OddError


def added(core: FakeCore) -> list[str]:
    return [request.req_id for request in core.added]


def config_of(core: FakeCore) -> EngineConfig:
    assert core.config is not None
    return core.config


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("PENSTOCK_TEST_SILENCE", str(tmp_path / "silence"))
    return EngineConfig.create(str(write_model(tmp_path / "model")), step_timeout_s=20, max_num_seqs=3)


@pytest.fixture
def start(config: EngineConfig) -> Iterator[Callable[..., CoreGroup]]:
    started = []
    # A test before this one may have left a process that is still ending.
    others = set(psutil.Process().children())

    def start_one(**options: Any) -> CoreGroup:
        started.append(CoreGroup(replace(config, parallel=replace(config.parallel, **options)), load_odd))
        return started[-1]

    yield start_one
    for core in started:
        core.close()
    assert set(psutil.Process().children()) <= others


def add(core: CoreGroup, req_id: str, first: int = 9, **fields: Any) -> None:
    params = SamplingParams(max_tokens=6, seed=5)
    core.add_request(EngineRequest(req_id=req_id, prompt_token_ids=[first, 10], sampling_params=params, **fields))


def step(core: CoreGroup, outputs: dict[str, list[EngineCoreOutput]]) -> None:
    for output in core.step():
        outputs.setdefault(output.req_id, []).append(output)


def finish(core: CoreGroup) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    deadline = time.monotonic() + LIMIT_S
    while core.has_unfinished_requests():
        step(core, outputs)
        assert time.monotonic() < deadline, f"it hangs, after {outputs}"
    return outputs


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def kill(core: CoreGroup) -> None:
    """Kill a core's process, and wait for its replacement."""
    first = core.process_ids
    os.kill(first[0], signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while core.process_ids == first:
        core.step()
        assert time.monotonic() < deadline
    core.check_health()


@pytest.mark.slow
def test_an_abort_that_names_a_request_twice_ends_it_once(start: Callable[..., CoreGroup]) -> None:
    core = start()
    add(core, "a", SILENT)
    assert [output.req_id for output in core.abort_requests(["a", "a"])] == ["a"]
    add(core, "a")
    assert len(tokens(finish(core)["a"])) == 6


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("fields", [{"cache_salt": "\udc80"}, {"priority": 1 << 70}])
@pytest.mark.slow
def test_what_no_message_can_hold_is_refused_and_forgotten(
    start: Callable[..., CoreGroup], fields: dict[str, Any], is_running: bool
) -> None:
    core = start()
    if not is_running:
        os.kill(core.process_ids[0], signal.SIGSTOP)
        os.kill(core.process_ids[0], signal.SIGKILL)
        while all(engine.is_running for engine in core._engines):
            core.step()
    with pytest.raises(InvalidRequest, match="Request 'a' cannot be sent to the core"):
        add(core, "a", **fields)
    add(core, "a")
    assert list(finish(core)) == ["a"]


@pytest.mark.slow
@pytest.mark.parametrize("num_cores", [1, 2])
def test_statistics_are_of_all_cores_that_run(start: Callable[..., CoreGroup], num_cores: int) -> None:
    core = start(data_parallel_size=num_cores)
    for req_id in ("a", "b", "c"):
        add(core, req_id, SILENT if req_id == "a" else 9)
    stats = core.stats()
    assert (stats.num_blocks, stats.num_used_blocks) == (8 * num_cores, 2 * num_cores)
    finish(core)
    assert core.stats().num_running_reqs == 0
    os.kill(core.process_ids[0], signal.SIGKILL)
    while all(engine.is_running for engine in core._engines):
        core.step()
    assert core.stats().num_blocks == 8 * (num_cores - 1)


@pytest.mark.slow
def test_errors_that_no_message_can_hold_arrive_nevertheless(start: Callable[..., CoreGroup]) -> None:
    core = start()
    first = core.process_ids
    with pytest.raises(OddError, match=r"no such file: \\udcff") as raised:
        core.collective_rpc(RpcCall(raising_odd))
    assert (raised.value.name, raised.value.number) == ("\\udcff", str(1 << 70))
    assert core.process_ids == first


@pytest.mark.slow
def test_an_error_like_the_end_of_a_connection_is_reported_as_it_is(config: EngineConfig) -> None:
    with pytest.raises(RemoteError, match="EOFError: the file is too short"):
        CoreGroup(config, load_at_its_end)


@pytest.mark.slow
@pytest.mark.parametrize("is_lost", [False, True])
def test_others_do_not_wait_for_a_suspect_that_is_aborted(start: Callable[..., CoreGroup], is_lost: bool) -> None:
    """is_lost: the suspect is aborted while there is no core, so no step tells that it has ended."""
    core = start(step_timeout_s=60)
    add(core, "poison", POISON)
    add(core, "a")
    add(core, "b")

    def is_alone() -> bool:
        core.step()
        # One that dies of them does not answer.
        with suppress(ProcessLost):
            return core.collective_rpc(RpcCall(added)) == [["poison"]]
        return False

    # Two cores die of the three; the next one has the first of them alone.
    wait_until(is_alone)
    if is_lost:
        kill(core)
    core.abort_requests(["poison"])
    outputs = finish(core)
    assert [len(tokens(outputs[name])) for name in ("a", "b")] == [6, 6]


@pytest.mark.slow
def test_repeated_external_kills_convict_no_request_early(start: Callable[..., CoreGroup], tmp_path: Path) -> None:
    core = start(max_restarts=9)
    (tmp_path / "silence").touch()
    add(core, "a", SILENT)
    for _ in range(3):
        kill(core)
    (tmp_path / "silence").unlink()
    outputs = finish(core)["a"]
    assert (outputs[-1].finish_reason, len(tokens(outputs))) == (FinishReason.LENGTH, 6)


@pytest.mark.slow
def test_who_had_no_turn_is_no_suspect(start: Callable[..., CoreGroup], tmp_path: Path) -> None:
    core = start()
    (tmp_path / "silence").touch()
    for index in range(6):
        add(core, f"r{index}", SILENT)
    for _ in range(2):
        kill(core)
    # Three run at a time: one of these is tried, and the two others wait for that.
    assert core.collective_rpc(RpcCall(added)) == [["r0", "r3", "r4", "r5"]]
    (tmp_path / "silence").unlink()
    assert all(len(tokens(outputs)) == 6 for outputs in finish(core).values())


@pytest.mark.slow
def test_the_refusal_of_a_request_is_not_that_of_the_next_one_of_its_name(
    start: Callable[..., CoreGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start()
    monkeypatch.setattr(core_group, "REFUSAL_TIMEOUT_S", 0.1)
    os.kill(core.process_ids[0], signal.SIGSTOP)
    add(core, "a", 12)
    core.abort_requests(["a"])
    add(core, "a")
    os.kill(core.process_ids[0], signal.SIGCONT)
    outputs = finish(core)["a"]
    assert (outputs[-1].finish_reason, len(tokens(outputs))) == (FinishReason.LENGTH, 6)


@pytest.mark.slow
def test_a_process_that_cannot_be_started_is_tried_again(
    start: Callable[..., CoreGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start()
    add(core, "a")
    real, failures = ProcessStarter.start, [OSError(12, "Cannot allocate memory")]

    def start_later(starter: ProcessStarter, *args: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(starter, *args)

    monkeypatch.setattr(ProcessStarter, "start", start_later)
    os.kill(core.process_ids[0], signal.SIGKILL)
    assert len(tokens(finish(core)["a"])) == 6
    assert not failures


@pytest.mark.slow
def test_a_core_that_replaces_another_takes_the_memory_that_that_one_had(start: Callable[..., CoreGroup]) -> None:
    core = start()
    kill(core)
    (config,) = core.collective_rpc(RpcCall(config_of))
    assert (config.replaces_lost_core, config.cache.kv_cache_memory_bytes) == (True, 1 << 20)


def test_what_is_free_beside_other_engines_is_no_limit_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path)
    monkeypatch.setattr("penstock.device.cpu.memory_limit", lambda: MemoryLimit(total_bytes=1 << 30, free_bytes=1))
    config = EngineConfig.create(str(tmp_path), **{**SMALL, "kv_cache_memory_bytes": 1 << 20})
    with pytest.raises(OutOfMemory, match="kv_cache_memory_bytes=1048576 is more than what is free"):
        EngineCore(config)
    core = EngineCore(replace(config, replaces_lost_core=True))
    assert core.kv_cache_bytes > 1 << 19
    core.close()


@pytest.mark.slow
def test_a_group_that_is_dropped_leaves_nothing(config: EngineConfig) -> None:
    with nothing_left():
        core = CoreGroup(config, load_odd)
        add(core, "a", SILENT)
        core.step()
        del core
        gc.collect()
