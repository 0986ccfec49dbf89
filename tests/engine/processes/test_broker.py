"""A broker serves several front ends: each loses only its own requests, and a lost broker loses none."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.config import EngineConfig
from penstock.config.queue import QueueLimits
from penstock.contract import SamplingParams, decode, encode
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.messages import AddRequest, Answer, CloseCore, CoreStarted, EngineRequest, FromCore, ToCore
from penstock.errors import ContextTooLong, EngineDead, InvalidRequest, Overloaded, error_from_data
from support.brokers import BrokerUnderTest
from support.fake_engine import FakeCore, write_model
from support.waiting import PATIENCE_S, wait_until

PARAMS = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
PROMPTS = [[9, 10 + index] for index in range(6)]


def slow(config: EngineConfig) -> FakeCore:
    core = FakeCore(config)
    core.on_step = lambda step: time.sleep(0.02)
    return core


def refusing(config: EngineConfig) -> FakeCore:
    core = slow(config)
    core.refuses = lambda request: request.prompt_token_ids[-1] == 12
    return core


def dying(config: EngineConfig) -> FakeCore:
    def on_step(step: int) -> None:
        if step == 3:
            raise EngineDead("workers failed four times")

    core = FakeCore(config)
    core.on_step = on_step
    return core


def ids_of_running(core: FakeCore) -> list[str]:
    return sorted(core.running)


def never_starting(config: EngineConfig) -> FakeCore:
    time.sleep(3600)
    raise AssertionError


def sleeping(core: FakeCore) -> str:
    time.sleep(1.0)
    return "awake"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig.create(str(write_model(tmp_path_factory.mktemp("model"))), max_num_seqs=4)


@pytest.fixture
def start(config: EngineConfig, tmp_path: Path) -> Iterator[Callable[..., BrokerUnderTest]]:
    started: list[BrokerUnderTest] = []

    def start_one(load_core: Callable[[EngineConfig], FakeCore] = slow, **options: Any) -> BrokerUnderTest:
        started.append(BrokerUnderTest(tmp_path, config, load_core=load_core, **options))
        return started[-1]

    yield start_one
    for broker in started:
        broker.close()


async def tokens(engine: AsyncEngine, prompt: list[int], params: SamplingParams = PARAMS) -> list[int]:
    """Token ids of the whole output; no output may lack a token that an earlier one had."""
    so_far: list[int] = []
    async for output in engine.generate({"prompt_token_ids": prompt}, params):
        now = output.outputs[0].token_ids
        assert now[: len(so_far)] == so_far
        so_far = now
    assert output.outputs[0].finish_reason == "length", output.error
    return so_far


def expected(config: EngineConfig) -> list[list[int]]:
    """Token ids for `PROMPTS` of an engine in this process."""

    async def run() -> list[list[int]]:
        async with AsyncEngine.from_config(config, FakeCore) as engine:
            return list(await asyncio.gather(*(tokens(engine, prompt) for prompt in PROMPTS)))

    return asyncio.run(run())


def test_two_front_ends_get_the_tokens_of_an_engine_in_this_process(
    start: Callable[..., BrokerUnderTest], config: EngineConfig
) -> None:
    async def run() -> None:
        async with broker.connect() as one, broker.connect() as other:
            streams = [tokens(engine, prompt) for prompt in PROMPTS for engine in (one, other)]
            found = await asyncio.wait_for(asyncio.gather(*streams), PATIENCE_S)
            assert found[::2] == found[1::2] == wanted

    broker = start()
    wanted = expected(config)
    asyncio.run(run())


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow
def test_streams_go_on_after_the_loss_of_the_broker(
    start: Callable[..., BrokerUnderTest], config: EngineConfig, sent: signal.Signals
) -> None:
    async def run() -> list[list[int]]:
        async with broker.connect() as one, broker.connect() as other:
            streams = asyncio.gather(*(tokens(engine, prompt) for engine in (one, other) for prompt in PROMPTS))
            await asyncio.sleep(0.2)
            os.kill(broker.process.pid, sent)
            return await asyncio.wait_for(streams, PATIENCE_S)

    broker = start(heartbeat_timeout_s=1.0)
    assert asyncio.run(run()) == expected(config) * 2
    assert broker.process.num_restarts == 1


def test_a_front_end_that_ends_loses_its_own_requests_only(
    start: Callable[..., BrokerUnderTest], config: EngineConfig
) -> None:
    broker = start()
    connection = connected(broker)
    connection.send_bytes(encode(ToCore(AddRequest(call_id=1, request=request("lost", max_tokens=1000)))))

    async def run() -> None:
        async with broker.connect() as other:
            stream = asyncio.ensure_future(tokens(other, PROMPTS[0]))
            while "lost" not in (await other.collective_rpc(ids_of_running))[0]:
                await asyncio.sleep(0.01)
            connection.close()
            while "lost" in (await other.collective_rpc(ids_of_running))[0]:
                await asyncio.sleep(0.01)
            assert [await stream] == wanted

    wanted = expected(config)[:1]
    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_front_end_that_reads_nothing_stalls_no_other(
    start: Callable[..., BrokerUnderTest], config: EngineConfig
) -> None:
    broker = start()
    connection = connected(broker)
    # Its outputs fill the socket many times over.
    connection.send_bytes(encode(ToCore(AddRequest(call_id=1, request=request("r" * 100_000, max_tokens=1_000_000)))))

    async def run() -> None:
        async with broker.connect() as other:
            found = await asyncio.gather(*(tokens(other, prompt) for prompt in PROMPTS))
            assert found == wanted

    wanted = expected(config)
    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    # It gets everything once it reads, in order.
    received: list[int] = []
    while len(received) < 60:
        message = decode(connection.recv_bytes(), FromCore).message
        if hasattr(message, "outputs"):
            received += [token for output in message.outputs for token in output.new_token_ids]
    core = FakeCore()
    core.add_request(request("again", max_tokens=1_000_000))
    again = [core.step()[0].new_token_ids[0] for _ in received]
    assert received == again
    connection.close()


def test_a_core_refuses_a_request_before_its_stream_begins(start: Callable[..., BrokerUnderTest]) -> None:
    async def run() -> None:
        async with broker.connect() as engine:
            with pytest.raises(ContextTooLong, match="too small"):
                await engine.submit({"prompt_token_ids": [9, 12]}, PARAMS)
            async with await engine.submit({"prompt_token_ids": [9, 11]}, PARAMS) as admitted:
                outputs = [output async for output in admitted]
            assert outputs[-1].finished

    broker = start(refusing)
    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_full_queue_refuses_requests_until_it_has_room(start: Callable[..., BrokerUnderTest]) -> None:
    long = SamplingParams(max_tokens=60, seed=1, ignore_eos=True)

    async def run() -> None:
        async with broker.connect() as one, broker.connect() as other:
            # Four run at once, and two are queued.
            admitted = [await (one, other)[i % 2].submit({"prompt_token_ids": [9, 20 + i]}, long) for i in range(6)]
            for engine in (one, other):
                with pytest.raises(Overloaded, match="max_num_queued_requests=2") as refused:
                    await engine.submit({"prompt_token_ids": [9, 30]}, long)
                assert 1.0 <= refused.value.retry_after_s <= 60.0
            admitted.pop().close()
            while True:
                try:
                    admitted.append(await other.submit({"prompt_token_ids": [9, 31]}, long))
                    break
                except Overloaded:
                    await asyncio.sleep(0.01)
            for stream in admitted:
                async for output in stream:
                    assert output.error is None
            assert len(output.outputs[0].token_ids) == 60

    broker = start(limits=QueueLimits(max_num_queued_requests=2))
    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    wait_until(lambda: bool(broker.statuses) and broker.statuses[-1].num_requests == 0)
    assert broker.statuses[-1].num_refused >= 2


@pytest.mark.slow
def test_admitted_requests_stay_admitted_after_the_loss_of_the_broker(start: Callable[..., BrokerUnderTest]) -> None:
    async def run() -> None:
        async with broker.connect() as engine:
            admitted = [await engine.submit({"prompt_token_ids": [9, 20 + i]}, PARAMS) for i in range(6)]
            os.kill(broker.process.pid, signal.SIGKILL)
            for stream in admitted:
                outputs = [output async for output in stream]
                assert outputs[-1].outputs[0].finish_reason == "length", outputs[-1].error

    broker = start(limits=QueueLimits(max_num_queued_requests=2))
    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.mark.slow
def test_a_broker_sends_heartbeats_during_a_long_call(
    start: Callable[..., BrokerUnderTest], config: EngineConfig
) -> None:
    async def run() -> None:
        async with broker.connect() as engine:
            call = asyncio.ensure_future(engine.collective_rpc(sleeping))
            found = await asyncio.gather(*(tokens(engine, prompt) for prompt in PROMPTS))
            assert found == wanted
            assert await call == ["awake"]
        assert broker.process.num_restarts == 0

    broker = start(heartbeat_timeout_s=0.6)
    wanted = expected(config)
    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_two_requests_of_one_id_are_refused_also_from_two_front_ends(start: Callable[..., BrokerUnderTest]) -> None:
    async def run() -> None:
        async with broker.connect() as one, broker.connect() as other:
            first = await one.submit({"prompt_token_ids": [9, 10]}, PARAMS, "same")
            with pytest.raises(InvalidRequest, match="'same'"):
                await other.submit({"prompt_token_ids": [9, 11]}, PARAMS, "same")
            outputs = [output async for output in first]
            assert outputs[-1].outputs[0].finish_reason == "length"

    broker = start()
    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.mark.slow
def test_the_broker_ends_with_the_cause_when_its_core_has_failed_for_good(
    start: Callable[..., BrokerUnderTest],
) -> None:
    broker = start(dying)
    connection = connected(broker)
    connection.send_bytes(encode(ToCore(AddRequest(call_id=1, request=request("a", max_tokens=9)))))
    assert broker.has_failed.wait(PATIENCE_S)
    assert isinstance(broker.failures[0], EngineDead)
    assert "workers failed four times" in str(broker.failures[0])


def test_the_cores_end_with_the_broker(start: Callable[..., BrokerUnderTest]) -> None:
    broker = start()
    connected(broker)
    children = psutil.Process(broker.process.pid).children(recursive=True)
    assert children
    os.kill(broker.process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, PATIENCE_S)
    assert not alive


def test_a_broker_whose_core_loads_slowly_ends_when_it_is_asked_to(start: Callable[..., BrokerUnderTest]) -> None:
    broker = start(never_starting)
    wait_until(lambda: psutil.Process(broker.process.pid).children(), "the core's process starts")
    (core,) = psutil.Process(broker.process.pid).children()
    broker.process.expect_end()
    broker.process.send(encode(ToCore(CloseCore())))
    assert broker.process.wait(PATIENCE_S)
    _, alive = psutil.wait_procs([core], PATIENCE_S)
    assert not alive


def request(req_id: str, max_tokens: int) -> EngineRequest:
    return EngineRequest(
        req_id=req_id,
        prompt_token_ids=[9, 10],
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=5, ignore_eos=True),
    )


def connected(broker: BrokerUnderTest) -> Connection:
    """Raw connection to the broker, after its cores have started."""
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(broker.path)
    connection = Connection(raw.detach())
    # Heartbeats come while the cores start.
    while not isinstance(decode(connection.recv_bytes(), FromCore).message, CoreStarted):
        pass
    return connection


def test_a_raw_connection_gets_the_answer_to_a_bad_request(start: Callable[..., BrokerUnderTest]) -> None:
    broker = start(refusing)
    connection = connected(broker)
    bad = EngineRequest(req_id="bad", prompt_token_ids=[9, 12], sampling_params=SamplingParams(seed=1))
    connection.send_bytes(encode(ToCore(AddRequest(call_id=7, request=bad))))
    while not isinstance(message := decode(connection.recv_bytes(), FromCore).message, Answer):
        pass
    assert message.call_id == 7
    assert message.error is not None
    assert isinstance(error_from_data(message.error), ContextTooLong)
