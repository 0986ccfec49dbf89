"""Request features in a real engine, none of which leaks resources."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncEngine, RequestOutput, RequestOutputKind, SamplingParams, StreamingInput
from penstock.contract import SchedulerOutput
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import EngineDead
from penstock.features.structured_output.scheduling import StructuredOutputScheduling
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import SMALL, Result, add, finish, greedy, make_core, random_prompts, run
from support.fake_engine import byte_level_tokenizer, write_tokenizer

PROMPTS: list[Any] = [{"prompt_token_ids": prompt} for prompt in random_prompts((40, 9, 33, 17), VOCAB_SIZE, seed=2)]


def sampled(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 7, "max_tokens": 20, "ignore_eos": True, **fields})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder)
    return write_tokenizer(folder, byte_level_tokenizer())


@pytest.fixture(params=[False, True], ids=["sync", "async scheduling"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(folder), async_scheduling=request.param, **SMALL) as llm:
        yield llm
        assert_nothing_is_left(llm._session._core)


def assert_nothing_is_left(core: Any) -> None:
    assert isinstance(core, EngineCore)
    assert not core.scheduler.has_unfinished_requests()
    assert core.scheduler.kv_cache.num_used_blocks == 0


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def test_a_stop_string_cuts_the_same_text_and_frees_the_blocks(llm: LLM) -> None:
    free = [output.outputs[0] for output in llm.generate(PROMPTS, sampled())]
    stops = [completion.text[6:9] for completion in free]
    outputs = llm.generate(PROMPTS, [sampled(stop=[stop]) for stop in stops])
    for whole, stop, output in zip(free, stops, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.text == whole.text[: whole.text.index(stop)]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
        assert len(completion.token_ids) < len(whole.token_ids)


def test_samples_share_the_prompts_blocks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = llm._session._core.scheduler  # type: ignore[attr-defined]
    schedule, found = scheduler.schedule, []

    def noted() -> SchedulerOutput:
        output: SchedulerOutput = schedule()
        found.extend(request.num_computed_tokens for request in output.scheduled_new_reqs)
        return output

    (alone,) = llm.generate(PROMPTS[0], sampled())
    llm.reset_prefix_cache()
    monkeypatch.setattr(scheduler, "schedule", noted)
    (output,) = llm.generate(PROMPTS[0], sampled(n=4))
    # 40 tokens are two full blocks of 16, which the three other samples find.
    assert found == [0, 32, 32, 32]
    assert output.num_cached_tokens == 0
    texts = tokens_of([output])
    assert texts[0] == alone.outputs[0].token_ids
    assert len({tuple(text) for text in texts}) == 4


def test_samples_are_the_same_with_and_without_a_prefix_cache(llm: LLM, folder: Path) -> None:
    shared = tokens_of(llm.generate(PROMPTS, sampled(n=3)))
    with LLM(str(folder), enable_prefix_caching=False, **SMALL) as plain:
        assert tokens_of(plain.generate(PROMPTS, sampled(n=3))) == shared


def test_a_truncated_prompt_is_answered_as_its_last_tokens_alone(llm: LLM) -> None:
    prompt = PROMPTS[0]["prompt_token_ids"]
    (cut,) = llm.generate(PROMPTS[0], sampled(truncate_prompt_tokens=12))
    (alone,) = llm.generate({"prompt_token_ids": prompt[-12:]}, sampled())
    assert cut.prompt_token_ids == prompt[-12:]
    assert tokens_of([cut]) == tokens_of([alone])


def test_metrics_are_in_order_and_count_the_cached_tokens(llm: LLM) -> None:
    llm.generate(PROMPTS[0], sampled())
    (output,) = llm.generate(PROMPTS[0], sampled(n=2))
    metrics = output.metrics
    assert metrics.num_cached_tokens == output.num_cached_tokens == 32
    assert (metrics.num_generated_tokens, metrics.num_outputs) == (40, 2)
    assert metrics.first_scheduled_time is not None
    assert metrics.first_token_time is not None
    assert metrics.last_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
    assert metrics.first_token_time < metrics.last_token_time <= metrics.finished_time
    assert metrics.time_per_output_token_s is not None
    assert 0 < metrics.time_per_output_token_s < metrics.latency_s  # type: ignore[operator]


def test_lower_priorities_run_first(folder: Path) -> None:
    core = make_core(folder, policy="priority", max_num_seqs=1)
    for index, priority in enumerate((5, 0, -5, 3)):
        add(core, f"r{index}", [5, 6, index + 7], greedy(2), priority=priority)
    order = []
    while core.has_unfinished_requests():
        order += [output.req_id for output in core.step() if output.finish_reason is not None]
    assert order == ["r2", "r1", "r3", "r0"]
    core.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.each_value_quick
def test_the_prefix_cache_can_be_reset_at_any_step_of_running_requests(
    folder: Path, async_scheduling: bool, policy: str
) -> None:
    prompts = [prompt["prompt_token_ids"] for prompt in PROMPTS]
    params = [sampled(seed=seed) for seed in range(4)]
    core = make_core(folder, async_scheduling=async_scheduling, policy=policy)
    undisturbed = [result.tokens for result in run(core, prompts, params)]
    for at in range(1, 12, 2):
        results: dict[str, Result] = {}
        for index, prompt in enumerate(prompts):
            add(core, f"r{index}", prompt, params[index])
        for _ in range(at):
            for output in core.step():
                results.setdefault(output.req_id, Result()).take(output)
        assert not core.reset_prefix_cache()
        assert core.reset_prefix_cache(reset_running_requests=True)
        assert core.scheduler.kv_cache.num_used_blocks == 0
        finish(core, results)
        assert [results[f"r{index}"].tokens for index in range(4)] == undisturbed
        assert all(result.num_preemptions == 1 for result in results.values())
    core.step()
    assert_nothing_is_left(core)
    core.close()


# These look inside the core, and make its worker fail: it is in this process.
HERE = {**SMALL, "enable_multiprocessing": False}


async def collect(engine: AsyncEngine, prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
    async for output in engine.generate(prompt, params, **options):
        last = output
    return last


async def settled(engine: AsyncEngine) -> None:
    """Once the core has taken in what it was told, and has nothing to run."""
    await engine._thread.call("settled", lambda: None)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_async_engine_gives_the_tokens_of_the_offline_one(folder: Path, async_scheduling: bool) -> None:
    with LLM(str(folder), **SMALL) as llm:
        expected = tokens_of(llm.generate(PROMPTS, [sampled(n=index % 2 + 1, seed=index) for index in range(4)]))

    async def serve() -> list[RequestOutput]:
        async with AsyncEngine(str(folder), async_scheduling=async_scheduling, **HERE) as engine:
            calls = [
                collect(engine, prompt, sampled(n=index % 2 + 1, seed=index)) for index, prompt in enumerate(PROMPTS)
            ]
            outputs = await asyncio.gather(*calls)
            await settled(engine)
            assert_nothing_is_left(engine._dispatcher.core)
            return outputs

    assert tokens_of(asyncio.run(serve())) == expected


def test_readers_that_leave_at_any_output_free_their_blocks(folder: Path) -> None:
    async def serve() -> None:
        async with AsyncEngine(str(folder), async_scheduling=True, **HERE) as engine:
            undisturbed = (await collect(engine, PROMPTS[1], sampled())).outputs[0].token_ids
            for num_outputs in range(1, 8):
                other = asyncio.create_task(collect(engine, PROMPTS[1], sampled()))
                stream = engine.generate(PROMPTS[0], sampled(n=num_outputs % 3 + 1, max_tokens=60))
                for _ in range(num_outputs):
                    # A reader that is kept waiting gets many tokens at once, and then may see the end first.
                    if (await anext(stream)).finished:
                        break
                await stream.aclose()
                assert (await other).outputs[0].token_ids == undisturbed
                await settled(engine)
                assert_nothing_is_left(engine._dispatcher.core)

    asyncio.run(serve())


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompt_that_comes_in_parts_is_answered_as_the_whole_would_be(folder: Path, async_scheduling: bool) -> None:
    parts = [prompt["prompt_token_ids"] for prompt in PROMPTS[:3]]
    params = greedy(7)

    async def stream() -> AsyncGenerator[StreamingInput, None]:
        for part in parts:
            yield StreamingInput(part)

    async def serve() -> list[RequestOutput]:
        async with AsyncEngine(str(folder), async_scheduling=async_scheduling, **HERE) as engine:
            outputs = [output async for output in engine.generate(stream(), params)]
            await settled(engine)
            assert_nothing_is_left(engine._dispatcher.core)
            return outputs

    outputs = asyncio.run(serve())
    answers: list[list[int]] = []
    context: list[int] = []
    with LLM(str(folder), enable_prefix_caching=False, **SMALL) as llm:
        for part in parts:
            context = [*context, *(answers[-1][:-1] if answers else []), *part]
            answers += tokens_of(llm.generate({"prompt_token_ids": context}, params))
    assert outputs[-1].outputs[0].token_ids == [token_id for answer in answers for token_id in answer]
    assert outputs[-1].prompt_token_ids == context
    # All full blocks of what was said before come from the cache.
    assert outputs[-1].num_cached_tokens == (len(context) - len(parts[-1])) // 16 * 16


def test_two_async_engines_live_in_one_process(folder: Path) -> None:
    async def serve() -> None:
        async with AsyncEngine(str(folder), **HERE) as first, AsyncEngine(str(folder), **HERE) as second:
            kinds = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
            both = [collect(engine, PROMPTS[0], sampled()) for engine in (first, second)]
            one, other = await asyncio.gather(*both)
            assert tokens_of([one]) == tokens_of([other])
            first.shutdown()
            for kind in kinds:
                assert (await collect(second, PROMPTS[0], sampled(), output_kind=kind)).finished

    asyncio.run(serve())


class FragileWorker(Worker):
    """Dies at chosen steps."""

    deaths: tuple[int, ...] = ()
    executed = 0

    def execute_model(self, output: SchedulerOutput) -> None:
        cls = type(self)
        cls.executed += 1
        super().execute_model(output)
        if cls.executed in cls.deaths:
            raise RuntimeError("the device is gone")


def test_a_worker_that_dies_interrupts_no_stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(folder), **SMALL) as llm:
        expected = tokens_of(llm.generate(PROMPTS, sampled(n=2)))
    monkeypatch.setattr(FragileWorker, "deaths", (1, 4, 5, 15))
    monkeypatch.setattr(FragileWorker, "executed", 0)

    async def serve() -> list[RequestOutput]:
        async with AsyncEngine(str(folder), worker_cls=f"{__name__}.FragileWorker", **HERE) as engine:
            return await asyncio.gather(*(collect(engine, prompt, sampled(n=2)) for prompt in PROMPTS))

    assert tokens_of(asyncio.run(serve())) == expected
    assert FragileWorker.executed > 15


def test_a_worker_that_keeps_dying_is_told_to_every_reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FragileWorker, "deaths", tuple(range(3, 100)))
    monkeypatch.setattr(FragileWorker, "executed", 0)

    async def serve() -> list[Any]:
        async with AsyncEngine(str(folder), worker_cls=f"{__name__}.FragileWorker", max_restarts=1, **HERE) as engine:
            calls = (collect(engine, prompt, sampled()) for prompt in PROMPTS)
            errors = await asyncio.gather(*calls, return_exceptions=True)
            with pytest.raises(EngineDead, match="the device is gone"):
                await collect(engine, PROMPTS[0], sampled())
            return errors

    errors = asyncio.run(serve())
    assert len(errors) == 4
    assert all(isinstance(error, EngineDead) and "the device is gone" in str(error) for error in errors)


@pytest.mark.parametrize("prompt", PROMPTS[:2], ids=["when it is admitted", "when its first block is full"])
def test_what_one_request_makes_the_scheduler_raise_ends_no_other_stream(
    folder: Path, monkeypatch: pytest.MonkeyPatch, prompt: dict[str, Any]
) -> None:
    # Intake refuses this salt; here it stands for whatever intake does not know of.
    monkeypatch.setattr("penstock.engine.inputs.input_processor.check_sendable", lambda fields: None)

    async def texts(engine: AsyncEngine, prompt: Any) -> RequestOutput:
        async for output in engine.generate(prompt, sampled()):
            last = output
        return last

    async def serve() -> list[RequestOutput]:
        async with AsyncEngine(str(folder), enable_multiprocessing=False, **SMALL) as engine:
            bad = {**prompt, "cache_salt": "\ud800"}
            outputs = await asyncio.gather(texts(engine, PROMPTS[2]), texts(engine, bad), texts(engine, PROMPTS[3]))
            assert_nothing_is_left(engine._dispatcher.core)
            return [*outputs, await texts(engine, PROMPTS[0])]

    before, bad, beside, after = asyncio.run(serve())
    assert bad.outputs[0].finish_reason == "error"
    assert "UnicodeEncodeError" in (bad.error or "")
    assert [output.outputs[0].finish_reason for output in (before, beside, after)] == ["length"] * 3


def test_a_request_whose_grammar_cannot_be_followed_does_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(folder)
    try:
        monkeypatch.setattr(StructuredOutputScheduling, "request_added", lambda self, request: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            add(core, "a", [1, 2, 3], greedy(4))
        assert_nothing_is_left(core)
    finally:
        core.close()
