"""Adapters of several front ends: a stream keeps its own, whichever processes are lost and however they return."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.contract import RpcCall, SamplingParams, part_of
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.messages import EngineRequest
from penstock.errors import AdapterNotFound, CheckpointError, InvalidRequest
from penstock.features.lora.request import AdapterPart, LoRARequest
from support.brokers import BrokerUnderTest
from support.fake_engine import FakeCore, write_model
from support.waiting import PATIENCE_S

PARAMS = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
# Tokens of each folder's weights.
TOKENS = {"folder x": 20, "folder k": 30, "folder of none": 40}


class AdaptedCore(FakeCore):
    """A fake core whose tokens are those of the folder of each request's adapter."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.tokens = lambda request, position: TOKENS[folder_of(request)]
        self.on_step = lambda step: time.sleep(0.02)

    def collective_rpc(self, call: RpcCall) -> list[Any]:
        if call.name == "loading_loras":
            return [set()]
        assert call.name in ("add_lora", "prefetch_lora", "remove_lora")
        (adapter,) = call.args
        if call.name == "add_lora" and adapter.lora_path not in TOKENS:
            raise CheckpointError(f"There is no {adapter.lora_path}.")
        return [True]


def folder_of(request: EngineRequest) -> str:
    part = part_of(request.parts, AdapterPart)
    assert part is not None
    assert part.identity > 0
    return part.lora_path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = str(write_model(tmp_path_factory.mktemp("model")))
    return EngineConfig.create(folder, max_num_seqs=8, enable_lora=True)


@pytest.fixture
def broker(tmp_path: Path, config: EngineConfig) -> Iterator[BrokerUnderTest]:
    made = BrokerUnderTest(tmp_path, config, load_core=AdaptedCore)
    yield made
    made.close()


async def load(engine: AsyncEngine, name: str) -> LoRARequest:
    """Load an adapter as `/v1/load_lora_adapter` does, and find it as a request does."""
    await engine.add_lora_of_new_name(LoRARequest(name, await engine.take_lora_number(), f"folder {name}"))
    return await find(engine, name)


async def find(engine: AsyncEngine, name: str) -> LoRARequest:
    (found,) = [adapter for adapter in await engine.known_loras() if adapter.lora_name == name]
    return found


async def tokens(engine: AsyncEngine, adapter: LoRARequest, begun: asyncio.Event | None = None) -> set[int]:
    async for output in engine.generate({"prompt_token_ids": [9, 10]}, PARAMS, lora_request=adapter):
        if begun is not None and output.outputs[0].token_ids:
            begun.set()
    assert output.outputs[0].finish_reason == "length", output.error
    return set(output.outputs[0].token_ids)


@pytest.mark.parametrize("is_first_back_first", [True, False], ids=["first front end first", "first front end last"])
@pytest.mark.one_case_quick
def test_streams_keep_their_adapters_after_the_loss_of_the_broker(
    broker: BrokerUnderTest, is_first_back_first: bool
) -> None:
    may_connect = {engine: threading.Event() for engine in ("first", "second")}
    late = may_connect["second" if is_first_back_first else "first"]

    async def run() -> None:
        for event in may_connect.values():
            event.set()
        first, second = (broker.connect(event) for event in may_connect.values())
        x = await load(first, "x")
        begun = asyncio.Event()
        of_x = asyncio.ensure_future(tokens(second, x, begun))
        await begun.wait()
        assert await second.remove_lora(x.lora_int_id)
        k = await load(second, "k")
        assert k.lora_int_id != x.lora_int_id
        streams = [asyncio.ensure_future(tokens(second, k)) for _ in range(4)]
        await asyncio.sleep(0.1)
        for event in may_connect.values():
            event.clear()
        os.kill(broker.process.pid, signal.SIGKILL)
        for event in may_connect.values():
            if event is not late:
                event.set()
        early = first if is_first_back_first else second
        await find(early, "k")
        late.set()
        assert await of_x == {20}
        assert await asyncio.gather(*streams) == [{30}] * len(streams)
        for engine in (first, second):
            assert [adapter.lora_name for adapter in await engine.known_loras()] == ["k"]
            assert await tokens(engine, await find(engine, "k")) == {30}
            with pytest.raises(AdapterNotFound, match="it was removed"):
                await tokens(engine, x)
        first.shutdown()
        second.shutdown()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.mark.slow
def test_adapters_outlive_the_front_end_over_which_they_came_and_the_broker(broker: BrokerUnderTest) -> None:
    async def run() -> None:
        async with broker.connect() as first:
            await load(first, "x")
            await first.offer_loras([LoRARequest("k", 1, "folder k")])
        os.kill(broker.process.pid, signal.SIGKILL)
        async with broker.connect() as second:
            assert [adapter.lora_name for adapter in await second.known_loras()] == ["x", "k"]
            assert await second.remove_lora((await find(second, "k")).lora_int_id)
            # A front end that starts offers those of the command line again.
            await second.offer_loras([LoRARequest("k", 1, "folder k")])
            assert [adapter.lora_name for adapter in await second.known_loras()] == ["x"]

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_name_is_loaded_once_and_listed_once_it_is_loaded(broker: BrokerUnderTest) -> None:
    async def run() -> None:
        async with broker.connect() as first, broker.connect() as second:
            with pytest.raises(CheckpointError, match="no folder z"):
                await load(first, "z")
            assert await second.known_loras() == []
            found = await asyncio.gather(*(load(engine, "x") for engine in (first, second)), return_exceptions=True)
            (refused,) = [one for one in found if isinstance(one, BaseException)]
            assert isinstance(refused, InvalidRequest)
            assert "There is an adapter 'x' already" in str(refused)
            assert len(await first.known_loras()) == 1

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.mark.slow
def test_calls_about_adapters_wait_for_the_next_broker(broker: BrokerUnderTest) -> None:
    async def run() -> None:
        async with broker.connect() as engine:
            x = await load(engine, "x")
            os.kill(broker.process.pid, signal.SIGSTOP)
            calls = (engine.known_loras(), engine.take_lora_number(), engine.remove_lora(x.lora_int_id))
            tasks = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(0.1)
            os.kill(broker.process.pid, signal.SIGKILL)
            _, number, is_removed = await asyncio.gather(*tasks)
            assert number == 2
            assert is_removed
            assert await engine.known_loras() == []

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
