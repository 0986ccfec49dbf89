"""Cores that are killed, exit, hang or fail for good are replaced, and requests continue with equal results."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.config import EngineConfig
from penstock.contract import RpcCall, SamplingParams
from penstock.engine.core import restarts
from penstock.engine.core.core_client import CoreClient
from penstock.engine.messages import EngineRequest
from penstock.engine.processes import core_group
from penstock.engine.processes.core_group import CoreGroup
from penstock.errors import EngineDead, InvalidRequest, NeedsNewProcess, ProcessLost
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from support.fake_engine import FakeCore, write_model
from support.waiting import PATIENCE_S, wait_until

PARAMS = SamplingParams(max_tokens=40, seed=5, logprobs=2)
POISON = 13


def slow(config: EngineConfig) -> FakeCore:
    core = FakeCore(config)
    core.on_step = lambda step: time.sleep(0.01)
    return core


def exiting_in_a_step(config: EngineConfig) -> FakeCore:
    """Core that exits in its tenth step."""
    core = slow(config)
    core.on_step = lambda step: os._exit(3) if step == 10 else time.sleep(0.01)
    return core


def failing_in_a_step(config: EngineConfig, error: Exception) -> FakeCore:
    """Core that raises an error in its tenth step; the others are slow, so that all requests have arrived by then."""

    def on_step(step: int) -> None:
        if step == 10:
            raise error
        time.sleep(0.01)

    core = FakeCore(config)
    core.on_step = on_step
    return core


def raising_in_a_step(config: EngineConfig) -> FakeCore:
    return failing_in_a_step(config, ZeroDivisionError("of all things"))


def needing_a_new_process(config: EngineConfig) -> FakeCore:
    return failing_in_a_step(config, NeedsNewProcess("the device's context is lost"))


def standing_still_in_a_step(config: EngineConfig) -> FakeCore:
    core = FakeCore(config)
    core.on_step = lambda step: time.sleep(3600 if step == 10 else 0.01)
    return core


def dying_at_once(config: EngineConfig) -> FakeCore:
    core = FakeCore(config)
    core.on_step = lambda step: os._exit(3)
    return core


def giving_up(config: EngineConfig) -> FakeCore:
    def on_step(step: int) -> None:
        raise EngineDead("workers failed four times in a row")

    core = FakeCore(config)
    core.on_step = on_step
    return core


def poisoned(config: EngineConfig) -> FakeCore:
    """Core that is killed by one kind of request."""
    core = FakeCore(config)

    def on_step(step: int) -> None:
        if any(request.prompt_token_ids[0] == POISON for request, _ in core.running.values()):
            os._exit(3)

    core.on_step = on_step
    return core


def recovering(config: EngineConfig) -> FakeCore:
    """Core that replaces its workers in a step, for longer than the step timeout."""
    core = FakeCore(config)

    def on_step(step: int) -> None:
        core.is_recovering = step == 3
        if core.is_recovering:
            time.sleep(3.5)
            core.is_recovering = False
            core.num_worker_restarts += 1

    core.on_step = on_step
    return core


def starting_again_when_told(config: EngineConfig) -> FakeCore:
    """Core that starts at once; replacements wait for a file."""
    started, go_on = (Path(str(config.model.folder)) / name for name in ("started", "go on"))
    if started.exists():
        wait_until(go_on.exists, "the file that lets it start")
    started.touch()
    return slow(config)


def starting_once(config: EngineConfig) -> FakeCore:
    """Core whose replacement cannot start."""
    marker = Path(str(config.model.folder)) / "started"
    if marker.exists():
        raise ValueError("the disk is gone")
    marker.touch()
    return slow(config)


def added(core: FakeCore) -> list[tuple[str, int]]:
    return [(request.req_id, len(request.output_token_ids)) for request in core.added]


def kill_itself(core: FakeCore) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def held() -> tuple[list[psutil.Process], int]:
    """Child processes and the number of descriptors of this process."""
    return psutil.Process().children(), psutil.Process().num_fds()


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig.create(str(write_model(tmp_path)), step_timeout_s=20)


@pytest.fixture
def start(config: EngineConfig) -> Iterator[Callable[..., CoreGroup]]:
    """Start core groups, and check for leaks at their end."""
    started = []
    before = held()

    def start_one(load_core: Callable[[EngineConfig], FakeCore], **options: Any) -> CoreGroup:
        started.append(CoreGroup(replace(config, parallel=replace(config.parallel, **options)), load_core))
        return started[-1]

    yield start_one
    for core in started:
        core.close()
        core.close()
    assert held() == before


def request(req_id: str, **fields: Any) -> EngineRequest:
    seed = int(req_id[1:])
    params = SamplingParams(max_tokens=40, seed=seed, logprobs=2 if seed % 2 else None)
    return EngineRequest(**{"req_id": req_id, "prompt_token_ids": [9, 10], "sampling_params": params, **fields})


class Reader:
    """Reader of the outputs of a core's requests."""

    def __init__(self, core: CoreClient, num_requests: int = 4) -> None:
        self.core = core
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        for index in range(num_requests):
            self.add(f"r{index}")

    def add(self, req_id: str, **fields: Any) -> None:
        self.core.add_request(request(req_id, **fields))
        self.outputs[req_id] = []

    def step(self) -> None:
        for output in self.core.step():
            assert self.outputs[output.req_id][-1:] != ["end"]
            self.outputs[output.req_id].append(output)

    def until(self, num_tokens: int) -> Reader:
        while min(len(self.tokens(req_id)) for req_id in self.outputs) < num_tokens:
            self.step()
        return self

    def finish(self) -> Reader:
        while self.core.has_unfinished_requests():
            self.step()
        return self

    def tokens(self, req_id: str) -> list[int]:
        return [token for output in self.outputs[req_id] for token in output.new_token_ids]

    def everything(self) -> dict[str, Any]:
        """Convert outputs to tokens, log-probabilities and finish reasons."""
        return {
            req_id: (
                self.tokens(req_id),
                [output.new_logprobs for output in outputs if output.new_logprobs is not None],
                [output.finish_reason for output in outputs if output.finish_reason is not None],
            )
            for req_id, outputs in self.outputs.items()
        }


def undisturbed(num_requests: int = 4) -> dict[str, Any]:
    return Reader(FakeCore(), num_requests).finish().everything()


def test_requests_go_on_when_their_core_is_killed(start: Callable[..., CoreGroup]) -> None:
    core = start(slow)
    reader = Reader(core).until(5)
    first = core.process_ids[0]
    os.kill(first, signal.SIGKILL)
    # The client reads nothing for a while; outputs that the core had sent are not repeated.
    time.sleep(0.2)
    assert reader.finish().everything() == undisturbed()
    assert core.process_ids[0] != first
    ((again, *_),) = [core.collective_rpc(RpcCall(added))]
    assert [req_id for req_id, _ in again] == ["r0", "r1", "r2", "r3"]
    assert all(num_tokens >= 5 for _, num_tokens in again)


def test_requests_go_on_when_their_core_stands_still(start: Callable[..., CoreGroup]) -> None:
    core = start(slow, step_timeout_s=0.7)
    reader = Reader(core).until(5)
    os.kill(core.process_ids[0], signal.SIGSTOP)
    assert reader.finish().everything() == undisturbed()


@pytest.mark.parametrize(
    "load_core", [exiting_in_a_step, raising_in_a_step, needing_a_new_process, standing_still_in_a_step]
)
@pytest.mark.one_case_quick
def test_requests_go_on_whatever_ends_their_core_in_a_step(
    start: Callable[..., CoreGroup], load_core: Callable[[EngineConfig], FakeCore]
) -> None:
    # Each of its cores brings nine tokens.
    core = start(load_core, step_timeout_s=0.7)
    first = core.process_ids[0]
    assert Reader(core).finish().everything() == undisturbed()
    assert core.process_ids[0] != first


def test_a_core_that_replaces_its_workers_is_not_taken_for_one_that_hangs(start: Callable[..., CoreGroup]) -> None:
    core = start(recovering, step_timeout_s=1.5)
    assert core.status().stats.num_blocks == 8, "an idle core shows its blocks"
    first, numbers, has_ended = core.process_ids, set[int](), threading.Event()

    def poll() -> None:
        while not has_ended.wait(0.05):
            numbers.add(core.status().num_recovering_workers)

    poller = threading.Thread(target=poll)
    poller.start()
    assert Reader(core).finish().everything() == undisturbed()
    has_ended.set()
    poller.join()
    assert numbers == {0, 1}
    assert core.status().num_recovering_workers == 0
    assert core.process_ids == first
    (engine,) = core.engines
    assert (engine.num_restarts, engine.num_worker_restarts) == (0, 1)


def test_time_without_a_waiting_client_does_not_count_for_the_heartbeat(start: Callable[..., CoreGroup]) -> None:
    core = start(slow, step_timeout_s=1.5)
    first = core.process_ids
    reader = Reader(core).until(2)
    time.sleep(3.0)
    assert reader.finish().everything() == undisturbed()
    assert core.process_ids == first


def test_an_idle_core_has_no_heartbeat_timeout(start: Callable[..., CoreGroup]) -> None:
    core = start(slow, step_timeout_s=1.5)
    first = core.process_ids
    os.kill(first[0], signal.SIGSTOP)
    begin = time.monotonic()
    while time.monotonic() - begin < 2.0:
        core.step()
    os.kill(first[0], signal.SIGCONT)
    assert Reader(core).finish().everything() == undisturbed()
    assert core.process_ids == first


def test_an_idle_core_that_dies_is_replaced_at_once(start: Callable[..., CoreGroup]) -> None:
    core = start(slow)
    Reader(core).finish()
    first = core.process_ids
    os.kill(first[0], signal.SIGKILL)
    wait_until(lambda: core.process_ids != first, "it is replaced")
    core.check_health()
    assert Reader(core).finish().everything() == undisturbed()


def test_a_core_that_has_stood_by_for_a_while_counts_as_good(
    start: Callable[..., CoreGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start(slow, max_restarts=1)
    monkeypatch.setattr(restarts, "GOOD_AFTER_S", 0.0)
    for _ in range(2):
        os.kill(core.process_ids[0], signal.SIGKILL)
        core.check_health()
    # Though it has something to do by now.
    core.add_request(request("r0"))
    os.kill(core.process_ids[0], signal.SIGKILL)
    core.check_health()
    core.abort_requests(["r0"])
    monkeypatch.undo()
    os.kill(core.process_ids[0], signal.SIGKILL)
    with pytest.raises(EngineDead, match="lost 2 times in a row"):
        core.check_health()


def test_restarts_come_later_and_later_and_end_with_the_cause(
    start: Callable[..., CoreGroup], caplog: pytest.LogCaptureFixture
) -> None:
    core = start(dying_at_once, max_restarts=2)
    reader = Reader(core)
    with pytest.raises(EngineDead, match=r"the core was lost 3 times in a row.*exit code 3 while it served") as raised:
        reader.finish()
    assert isinstance(raised.value.__cause__, ProcessLost)
    assert len(set(re.findall(r"The core, process (\d+), ended", f"{caplog.text} {raised.value}"))) == 3
    for call in (core.check_health, core.step, lambda: core.add_request(request("r9"))):
        with pytest.raises(EngineDead, match="3 times in a row"):
            call()
    assert core.abort_requests(["r0"]) == []


def test_results_in_between_begin_the_count_anew(start: Callable[..., CoreGroup]) -> None:
    core = start(exiting_in_a_step, max_restarts=1)
    assert Reader(core).finish().everything() == undisturbed()


def test_a_core_that_has_given_up_itself_is_not_tried_again(start: Callable[..., CoreGroup]) -> None:
    core = start(giving_up)
    first = core.process_ids
    with pytest.raises(EngineDead, match="^workers failed four times in a row$"):
        Reader(core).finish()
    assert core.process_ids == first


def test_a_core_that_does_not_start_again_is_the_end_with_its_cause(start: Callable[..., CoreGroup]) -> None:
    core = start(starting_once, max_restarts=1)
    reader = Reader(core).until(2)
    os.kill(core.process_ids[0], signal.SIGKILL)
    with pytest.raises(EngineDead, match="lost 2 times in a row.*ValueError: the disk is gone"):
        reader.finish()


def test_a_request_that_kills_its_cores_ends_and_others_go_on(start: Callable[..., CoreGroup]) -> None:
    core = start(poisoned)
    reader = Reader(core, 2)
    reader.add("r2", prompt_token_ids=[POISON, 10])
    reader.add("r3")
    found = reader.finish().everything()
    expected = undisturbed()
    assert {name: found[name] for name in ("r0", "r1", "r3")} == {name: expected[name] for name in ("r0", "r1", "r3")}
    (last,) = reader.outputs["r2"]
    assert last.finish_reason is FinishReason.ERROR
    assert "while they ran this request, the last time by itself" in (last.error or "")


def test_what_is_aborted_or_added_while_a_core_is_replaced_happens(
    start: Callable[..., CoreGroup], config: EngineConfig
) -> None:
    core = start(starting_again_when_told)
    reader = Reader(core, 3).until(3)
    first = core.process_ids
    os.kill(first[0], signal.SIGKILL)
    wait_until(lambda: core.process_ids != first, "it is replaced")
    (aborted,) = core.abort_requests(["r1", "unknown"])
    assert (aborted.req_id, aborted.finish_reason) == ("r1", FinishReason.ABORT)
    with pytest.raises(InvalidRequest, match="a request 'r0' already"):
        core.add_request(request("r0"))
    reader.add("r3")
    # The name is free, for another request.
    reader.add("r1", sampling_params=SamplingParams(max_tokens=4, seed=3))
    del reader.outputs["r1"][:]
    # None of this has waited for the core that starts.
    (config.model.folder / "go on").touch()
    found, expected = reader.finish().everything(), undisturbed()
    assert [found[name] for name in ("r0", "r2", "r3")] == [expected[name] for name in ("r0", "r2", "r3")]
    assert found["r1"][0] == expected["r3"][0][:4]


def test_a_call_whose_core_dies_raises_and_requests_continue(start: Callable[..., CoreGroup]) -> None:
    core = start(slow)
    reader = Reader(core).until(3)
    with pytest.raises(ProcessLost, match=r"collective_rpc was not answered: The core, process \d+, was killed by"):
        core.collective_rpc(RpcCall(kill_itself))
    assert core.reset_prefix_cache(reset_running_requests=True)
    assert reader.finish().everything() == undisturbed()


def test_who_waits_in_another_thread_is_woken(start: Callable[..., CoreGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_group, "LONGEST_WAIT_S", 2 * PATIENCE_S)
    core = start(slow)
    threading.Timer(0.05, core.wake).start()
    begin = time.monotonic()
    assert core.step() == []
    assert time.monotonic() - begin < PATIENCE_S


def test_the_history_of_a_request_goes_on_too(start: Callable[..., CoreGroup]) -> None:
    core = start(slow)
    reader = Reader(core, 1).until(3)
    os.kill(core.process_ids[0], signal.SIGKILL)
    outputs = reader.finish().outputs["r0"]
    assert {output.first_scheduled_time for output in outputs} == {outputs[0].first_scheduled_time}
    assert (outputs[0].num_preemptions, outputs[-1].num_preemptions) == (0, 1)
