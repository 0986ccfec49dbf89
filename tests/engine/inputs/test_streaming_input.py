"""Streaming input over a fake core with scripted tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from penstock import RequestOutput, RequestOutputKind, SamplingParams, StreamingInput
from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.errors import ContextTooLong, InvalidParameter, InvalidRequest
from support.fake_engine import FakeCore, write_model

PARAMS = SamplingParams(max_tokens=3, seed=5)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig.create(str(write_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def core() -> FakeCore:
    core = FakeCore()
    core.tokens = lambda request, position: 100 + 10 * (len(core.added) - 1) + position
    return core


@pytest.fixture
def engine(config: EngineConfig, core: FakeCore) -> Iterator[AsyncEngine]:
    engine = AsyncEngine.from_config(config, load_core=lambda config: core)
    yield engine
    engine.shutdown()


async def parts_of(*parts: Any) -> AsyncGenerator[Any, None]:
    for part in parts:
        yield part if isinstance(part, StreamingInput) or part is None else StreamingInput(part)
        await asyncio.sleep(0)


async def collect(engine: AsyncEngine, parts: Any, params: Any = PARAMS, **options: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(parts, params, **options)]


def assert_nothing_is_left(engine: AsyncEngine, core: FakeCore) -> None:
    engine._thread.submit(lambda: None).result(timeout=20)
    assert not core.running
    assert len(engine._streams) == 0


def test_each_part_is_answered_after_all_earlier_parts_and_answers(engine: AsyncEngine, core: FakeCore) -> None:
    outputs = asyncio.run(collect(engine, parts_of([10, 11], [20], [30, 31]), request_id="mine"))
    prompts = [request.prompt_token_ids for request in core.added]
    # The last token of each answer was never read by the model.
    assert prompts == [[10, 11], [10, 11, 100, 101, 20], [10, 11, 100, 101, 20, 110, 111, 30, 31]]
    assert {request.req_id for request in core.added} == {"mine"}
    assert [output.finished for output in outputs] == [*[False] * (len(outputs) - 1), True]
    assert outputs[-1].outputs[0].token_ids == [100, 101, 102, 110, 111, 112, 120, 121, 122]
    assert outputs[-1].prompt_token_ids == prompts[-1]
    assert_nothing_is_left(engine, core)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_every_kind_of_output_has_the_whole_answer(engine: AsyncEngine, kind: RequestOutputKind) -> None:
    params = SamplingParams(max_tokens=4, seed=5, logprobs=1)
    outputs = asyncio.run(collect(engine, parts_of([10], [20], [30]), params, output_kind=kind))
    assert [output.finished for output in outputs].count(True) == 1
    assert outputs[-1].finished
    completions = [output.outputs[0] for output in outputs]
    is_delta = kind is RequestOutputKind.DELTA
    chosen = completions if is_delta else completions[-1:]
    expected = [100 + 10 * turn + position for turn in range(3) for position in range(4)]
    assert [token_id for completion in chosen for token_id in completion.token_ids] == expected
    assert sum(len(completion.logprobs or []) for completion in chosen) == 12
    tokenizer = engine.get_tokenizer()
    pieces = [tokenizer.decode(expected[4 * turn : 4 * turn + 4]) for turn in range(3)]
    assert "".join(completion.text for completion in chosen) == "".join(pieces)
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(outputs) == 1


def test_a_part_may_have_its_own_parameters(engine: AsyncEngine, core: FakeCore) -> None:
    parts = parts_of([10], StreamingInput([20], SamplingParams(max_tokens=1)), [30])
    asyncio.run(collect(engine, parts))
    assert [request.sampling_params.max_tokens for request in core.added] == [3, 1, 3]
    assert core.added[2].prompt_token_ids == [10, 100, 101, 20, 30]


def test_only_the_first_text_begins_as_texts_begin(engine: AsyncEngine, core: FakeCore) -> None:
    asyncio.run(collect(engine, parts_of("the fox", " jumps")))
    tokenizer = engine.get_tokenizer()
    first = tokenizer.encode("the fox")
    assert core.added[0].prompt_token_ids == first
    rest = core.added[1].prompt_token_ids[len(first) + 2 :]
    assert rest == tokenizer.encode(" jumps", add_special_tokens=False)


@pytest.mark.parametrize(
    ("parts", "params", "error", "message"),
    [
        ((), PARAMS, InvalidRequest, "without a part"),
        ((None,), PARAMS, InvalidRequest, "gave a NoneType. Allowed: StreamingInput"),
        (([10], [400]), PARAMS, InvalidRequest, "token id 400"),
        (([10], [11] * 62), PARAMS, ContextTooLong, "The prompt has 65 tokens"),
        (([10],), SamplingParams(n=2), InvalidParameter, "n=2.*parts"),
        (([10],), {"n": 2}, InvalidParameter, "sampling_params is a dict"),
        (([10], {"prompt": "x", "cache_salt": "s"}), PARAMS, InvalidRequest, "cache_salt='s'"),
    ],
)
def test_a_bad_part_ends_the_request(
    engine: AsyncEngine, core: FakeCore, parts: Any, params: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        asyncio.run(collect(engine, parts_of(*parts), params))
    assert_nothing_is_left(engine, core)


def test_leaving_early_ends_the_turn(engine: AsyncEngine, core: FakeCore) -> None:
    async def leave() -> None:
        stream = engine.generate(parts_of([10], [20]), SamplingParams(max_tokens=40))
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert_nothing_is_left(engine, core)


def test_a_task_that_waits_for_the_next_part_can_be_cancelled(engine: AsyncEngine, core: FakeCore) -> None:
    async def never_more() -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput([10])
        await asyncio.Event().wait()

    async def cancel() -> None:
        outputs: list[RequestOutput] = []

        async def read() -> None:
            async for output in engine.generate(never_more(), PARAMS):
                outputs.append(output)

        task = asyncio.create_task(read())
        while not (outputs and len(outputs[-1].outputs[0].token_ids) == 3):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert_nothing_is_left(engine, core)


def test_an_abort_ends_all_turns(engine: AsyncEngine, core: FakeCore) -> None:
    core.on_step = lambda step: time.sleep(0.005)

    async def check() -> list[RequestOutput]:
        stream = collect(engine, parts_of([10], [20], [30]), SamplingParams(max_tokens=40), request_id="mine")
        task = asyncio.create_task(stream)
        while not core.added:
            await asyncio.sleep(0)
        await engine.abort("mine")
        return await task

    outputs = asyncio.run(check())
    assert outputs[-1].finished
    assert len(core.added) == 1
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert_nothing_is_left(engine, core)
