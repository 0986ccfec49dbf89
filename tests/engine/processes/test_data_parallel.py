"""Data parallel engines behind one client: routing, calls of all engines, and the loss of one."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.config import EngineConfig
from penstock.config.parallel import ParallelConfig
from penstock.contract import RpcCall, SamplingParams
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.messages import EngineRequest
from penstock.engine.processes.core_group import CoreGroup
from penstock.errors import ConfigError, EngineDead, OutOfMemory, ProcessLost, WaitTimeout
from penstock.features.weight_transfer.state import RankStatus
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from support.fake_engine import FakeCore, write_model
from support.waiting import wait_until


class ServedFake(FakeCore):
    """Slow fake core with one worker that answers the usual calls."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.on_step = lambda step: time.sleep(0.01)
        self.weights = config.load.load_format
        self.updates: list[Any] = []

    def collective_rpc(self, call: RpcCall) -> list[Any]:
        assert self.config is not None
        if call.name == "update_config":
            self.updates += call.args
            return [None]
        if call.name == "weight_update_status":
            return [RankStatus()]
        if call.name == "reload_weights":
            if self.config.parallel.data_parallel_rank == 1 and call.args:
                time.sleep(2 if call.args[0] == "and sleep" else 0)
                os._exit(3)
            self.weights, self.updates = "reloaded", []
            return [None]
        if call.name == "save_sharded_state":
            return [rank_of(self)]
        if call.name == "get_config":
            return [replace(self.config, load=replace(self.config.load, load_format="safetensors"))]
        return super().collective_rpc(call)


def load_served(config: EngineConfig) -> ServedFake:
    return ServedFake(config)


def first_starting_again_when_told(config: EngineConfig) -> ServedFake:
    """Create a core; engine 0 starts at once, and its replacement waits for a file."""
    started, go_on = (Path(str(config.model.folder)) / name for name in ("started", "go on"))
    if config.parallel.data_parallel_rank == 0:
        if started.exists():
            wait_until(go_on.exists, "the file that lets it start")
        started.touch()
    return ServedFake(config)


def second_not_starting(config: EngineConfig) -> FakeCore:
    if config.parallel.data_parallel_rank == 1:
        raise OutOfMemory("too little for the second")
    return ServedFake(config)


def rank_of(core: FakeCore) -> Any:
    assert core.config is not None
    return core.config.parallel.data_parallel_rank


def requests_of(core: FakeCore) -> list[str]:
    return [request.req_id for request in core.added]


def state_of(core: ServedFake) -> tuple[str, list[Any]]:
    assert core.config is not None
    return core.config.load.load_format, core.updates


def resets_of(core: FakeCore) -> int:
    return core.num_resets


def held() -> tuple[list[psutil.Process], int]:
    """Child processes and the number of descriptors of this process."""
    return psutil.Process().children(), psutil.Process().num_fds()


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig.create(str(write_model(tmp_path)), data_parallel_size=2, step_timeout_s=20, block_size=2)


@pytest.fixture
def core(config: EngineConfig) -> Iterator[CoreGroup]:
    """Create a core group, and check for leaks at its end."""
    before = held()
    group = CoreGroup(config, load_served)
    yield group
    group.close()
    assert held() == before


def add(core: CoreGroup, req_id: str, prompt: list[int] | None = None, max_tokens: int = 40) -> None:
    params = SamplingParams(max_tokens=max_tokens, seed=int(req_id[1:]))
    prompt = prompt or [9, int(req_id[1:])]
    core.add_request(EngineRequest(req_id=req_id, prompt_token_ids=prompt, sampling_params=params))


def finish(core: CoreGroup, tokens: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    tokens = {} if tokens is None else tokens
    while core.has_unfinished_requests():
        take(core.step(), tokens)
    return tokens


def take(outputs: list[EngineCoreOutput], tokens: dict[str, list[int]]) -> None:
    for output in outputs:
        tokens.setdefault(output.req_id, []).extend(output.new_token_ids)


def undisturbed(num_requests: int) -> dict[str, list[int]]:
    core = FakeCore()
    for index in range(num_requests):
        params = SamplingParams(max_tokens=40, seed=index)
        core.add_request(EngineRequest(req_id=f"r{index}", prompt_token_ids=[9, index], sampling_params=params))
    tokens: dict[str, list[int]] = {}
    while core.has_unfinished_requests():
        take(core.step(), tokens)
    return tokens


def test_requests_are_shared_and_all_are_answered(core: CoreGroup) -> None:
    for index in range(6):
        add(core, f"r{index}")
    assert core.collective_rpc(RpcCall(requests_of)) == [["r0", "r2", "r4"], ["r1", "r3", "r5"]]
    assert finish(core) == undisturbed(6)


def test_no_engine_waits_for_one_that_has_nothing_to_do(core: CoreGroup) -> None:
    """Outputs end whatever the other engine does: with no request, with one, and with a long one of two."""
    for lengths in ([], [7], [2, 60], [60, 2, 60, 2]):
        for index, length in enumerate(lengths):
            add(core, f"r{index}", max_tokens=length)
        num_tokens = {name: len(tokens) for name, tokens in finish(core).items()}
        assert num_tokens == {f"r{index}": length for index, length in enumerate(lengths)}


def test_prompts_with_one_beginning_go_to_one_engine_until_it_has_too_many(core: CoreGroup) -> None:
    add(core, "r0", [1, 2])
    for index in range(1, 8):
        add(core, f"r{index}", [9, 10, 11, index])
    first, second = core.collective_rpc(RpcCall(requests_of))
    # More than 1.5 times the one of the other engine, and 4.
    assert second == ["r1", "r2", "r3", "r4", "r5", "r6"]
    assert first == ["r0", "r7"]
    finish(core)
    # Blocks of a cleared cache attract no request.
    assert core.reset_prefix_cache()
    add(core, "r8", [9, 10, 11, 1])
    assert core.collective_rpc(RpcCall(requests_of))[0][-1] == "r8"


def test_all_engines_answer_in_their_order(core: CoreGroup) -> None:
    assert core.collective_rpc(RpcCall(rank_of)) == [0, 1]
    core.check_health()
    add(core, "r0")
    assert not core.reset_prefix_cache()
    assert core.reset_prefix_cache(reset_running_requests=True)
    assert core.collective_rpc(RpcCall(resets_of)) == [2, 2]


def test_what_would_write_the_same_files_is_asked_of_one_engine(core: CoreGroup) -> None:
    assert core.collective_rpc(RpcCall("save_sharded_state", ("folder",))) == [0]
    with pytest.raises(ConfigError, match="unique_reply_rank=1 is not valid. Allowed: 0"):
        core.collective_rpc(RpcCall("save_sharded_state", unique_reply_rank=1))


def log_a_number(core: FakeCore) -> None:
    logging.getLogger("penstock.engine.talking").warning("%d of these", 3)


def test_log_lines_have_their_engine_numbers(core: CoreGroup, caplog: pytest.LogCaptureFixture) -> None:
    core.collective_rpc(RpcCall(log_a_number))
    said = [record.getMessage() for record in caplog.records if record.name == "penstock.engine.talking"]
    assert sorted(said) == ["Engine 0: 3 of these", "Engine 1: 3 of these"]


def test_aborts_reach_the_engine_of_the_request(core: CoreGroup) -> None:
    for index in range(4):
        add(core, f"r{index}")
    ended = core.abort_requests(["r3", "r0"])
    assert {(output.req_id, output.finish_reason) for output in ended} == {
        ("r0", FinishReason.ABORT),
        ("r3", FinishReason.ABORT),
    }
    expected = undisturbed(4)
    assert finish(core) == {"r1": expected["r1"], "r2": expected["r2"]}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_while_an_engine_is_lost_and_replaced_others_go_on(config: EngineConfig, number: signal.Signals) -> None:
    parallel = replace(config.parallel, step_timeout_s=4.0)
    core = CoreGroup(replace(config, parallel=parallel), first_starting_again_when_told)
    for index in range(4):
        add(core, f"r{index}")
    tokens: dict[str, list[int]] = {}
    while len(tokens) < 4:
        take(core.step(), tokens)
    first = core.process_ids
    os.kill(first[0], number)
    while not all(len(tokens[req_id]) == 40 for req_id in ("r1", "r3")):
        take(core.step(), tokens)
    # One that hangs has not even been found out yet.
    assert number is signal.SIGKILL or core.process_ids == first
    # New requests are not kept waiting either.
    add(core, "r4")
    while len(tokens.get("r4", ())) < 40:
        take(core.step(), tokens)
    (config.model.folder / "go on").touch()
    assert finish(core, tokens) == undisturbed(5)
    assert core.process_ids[0] != first[0]
    assert core.process_ids[1] == first[1]
    core.close()


def test_what_was_changed_about_the_weights_survives_cores(core: CoreGroup) -> None:
    core.collective_rpc(RpcCall("update_config", ({"a": 1},)))
    core.collective_rpc(RpcCall("update_config", ({"b": 2},)))
    for pid in core.process_ids:
        os.kill(pid, signal.SIGKILL)
    core.check_health()
    assert core.collective_rpc(RpcCall(state_of)) == [("auto", [{"a": 1}, {"b": 2}])] * 2
    core.collective_rpc(RpcCall("reload_weights"))
    os.kill(core.process_ids[1], signal.SIGKILL)
    core.check_health()
    assert core.collective_rpc(RpcCall(state_of))[1] == ("safetensors", [])
    assert core.collective_rpc(RpcCall(rank_of)) == [0, 1]


def test_an_engine_that_is_lost_in_a_reload_loads_what_the_others_have(core: CoreGroup) -> None:
    with pytest.raises(ProcessLost, match=r"The core of engine 1, process \d+, ended with exit code 3"):
        core.collective_rpc(RpcCall("reload_weights", ("and die",)))
    core.check_health()
    assert core.collective_rpc(RpcCall(state_of))[1] == ("safetensors", [])


def test_an_engine_that_takes_too_long_for_a_reload_loads_what_the_others_have(core: CoreGroup) -> None:
    first = core.process_ids
    with pytest.raises(WaitTimeout, match=r"waited 0.5 s in collective_rpc for the core of engine 1"):
        core.collective_rpc(RpcCall("reload_weights", ("and sleep",), timeout_s=0.5))
    core.check_health()
    assert core.collective_rpc(RpcCall(state_of))[1] == ("safetensors", [])
    assert core.process_ids[0] == first[0]


def test_what_keeps_one_engine_from_starting_is_raised_and_nothing_is_left(config: EngineConfig) -> None:
    before = held()
    with pytest.raises(OutOfMemory, match="too little for the second"):
        CoreGroup(config, second_not_starting)
    assert held() == before


def test_the_end_of_one_engine_that_is_lost_for_good_is_the_end_of_all(config: EngineConfig) -> None:
    core = CoreGroup(replace(config, parallel=replace(config.parallel, max_restarts=0)), load_served)
    add(core, "r0")
    os.kill(core.process_ids[0], signal.SIGKILL)
    with pytest.raises(EngineDead, match="the core of engine 0 was lost once, .*SIGKILL"):
        finish(core)
    core.close()


def test_streams_of_an_async_engine_come_from_all(config: EngineConfig) -> None:
    async def collect(engine: AsyncEngine, seed: int) -> list[int]:
        params = SamplingParams(max_tokens=40, seed=seed)
        outputs = [output async for output in engine.generate({"prompt_token_ids": [9, seed]}, params)]
        return outputs[-1].outputs[0].token_ids

    async def serve() -> list[list[int]]:
        group = CoreGroup(config, load_served)
        async with AsyncEngine.from_config(config, lambda config: group) as engine:
            readers = [asyncio.create_task(collect(engine, seed)) for seed in range(6)]
            await asyncio.sleep(0.1)
            os.kill(group.process_ids[1], signal.SIGKILL)
            return await asyncio.gather(*readers)

    assert asyncio.run(serve()) == list(undisturbed(6).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size=0 is not valid"),
        ({"data_parallel_rank": 1}, r"data_parallel_rank=1 is not valid with data_parallel_size=1. Allowed: 0\."),
        ({"data_parallel_size": 4, "data_parallel_rank": 4}, "data_parallel_size=4. Allowed: 0 to 3"),
        ({"data_parallel_size": 4, "data_parallel_rank": "1"}, "data_parallel_rank='1' is not valid"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 3}, "data_parallel_size_local=3 .*Allowed: 1 to 2"),
        (
            {"data_parallel_size": 2, "data_parallel_size_local": 1},
            "data_parallel_size_local=1 .*no data_parallel_rank",
        ),
        ({"data_parallel_rank_local": 0}, "data_parallel_rank_local=0 is not valid without data_parallel_rank"),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_rank": 2,
                "data_parallel_size_local": 2,
                "data_parallel_rank_local": 2,
            },
            "data_parallel_rank_local=2 is not valid with 2 engines on this machine",
        ),
        ({"data_parallel_size": 2, "enable_multiprocessing": False}, "enable_multiprocessing=False is not valid"),
        ({"enable_multiprocessing": "yes"}, "enable_multiprocessing='yes' is not valid"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**options)


def test_each_engine_and_each_of_its_workers_has_its_own_place() -> None:
    both = ParallelConfig(data_parallel_size=2, tensor_parallel_size=2)
    places = [both.of_engine(engine).place(rank) for engine in range(2) for rank in range(2)]
    assert places == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert (both.num_engines_here, both.has_core_process) == (2, True)
    # Of four engines, two on each of two machines.
    one = ParallelConfig(data_parallel_size=4, data_parallel_size_local=2, data_parallel_rank=3)
    assert one.place(0) == (1, 2)
    assert (one.num_engines_here, one.has_core_process) == (1, False)
    assert replace(one, data_parallel_rank_local=0).place(0) == (0, 2)
    assert ParallelConfig().place(0) == (0, 1)
