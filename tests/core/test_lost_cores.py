"""Whole engines whose cores, or workers, are killed: what they say is what they say undisturbed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import LLM, PoolingParams, SamplingParams, StructuredOutputsParams
from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.inputs.prompts import Prompt
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.processes.core_group import CoreGroup
from penstock.engine.session import Session
from support.encoder_decoders import tone, write_whisper
from support.fake_engine import byte_level_tokenizer, write_tokenizer
from support.pooling_models import TINY_DECODER, TINY_ENCODER, random_model, random_text, save
from support.waiting import is_running, wait_until

pytestmark = pytest.mark.one_path(reason="what outlives a core is no matter of how it makes its steps")

DEMO: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": "64MiB", "max_num_seqs": 64}
PLAYS = ["ROMEO:", "JULIET:", "First Citizen:\nWe", "KING"]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    me = psutil.Process()
    processes, num_descriptors, memory = set(me.children(recursive=True)), me.num_fds(), _shared_memory()
    yield
    assert set(me.children(recursive=True)) <= processes
    wait_until(lambda: me.num_fds() <= num_descriptors, "all descriptors are closed")
    wait_until(lambda: _shared_memory() <= memory, "all memory is given back")


def _shared_memory() -> set[str]:
    """By the names that Python, torch and this project give it: other programs of this machine have some too."""
    names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    return {name for name in names if name.startswith(("psm_", "torch_", "penstock"))}


def varied_requests() -> tuple[list[Prompt], list[SamplingParams], list[int]]:
    """Requests whose state a new core needs: seeds, penalties, grammars, stop conditions, salts and priorities."""
    base = {"max_tokens": 150, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, **base),
        SamplingParams(seed=1, presence_penalty=0.7, frequency_penalty=0.2, logprobs=0, **base),
        SamplingParams(seed=2, top_p=0.9, min_tokens=20, stop=["the", "And"], max_tokens=150),
        SamplingParams(seed=3, bad_words=["And"], n=2, **base),
        SamplingParams(seed=4, max_tokens=150, structured_outputs=StructuredOutputsParams(regex="([a-z]+ ){30}[a-z]+")),
        SamplingParams(seed=5, repetition_penalty=1.3, min_p=0.01, logit_bias={30: 2.0}, **base),
    ]
    prompts: list[Prompt] = [
        *PLAYS,
        {"prompt": "ROMEO:", "cache_salt": "mine"},
        {"prompt": "A longer prompt than the others, of which blocks are found again. " * 4, "cache_salt": "mine"},
    ]
    return prompts, params, [3, 0, 1, 2, 0, 5]


def said(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (
            output.prompt_logprobs,
            [(c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in output.outputs],
        )
        for output in outputs
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"async_scheduling": True, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_whatever_a_request_asks_for_goes_on_over_the_death_of_its_core(options: dict[str, Any]) -> None:
    prompts, params, priorities = varied_requests()
    options = {**DEMO, **options, "policy": "priority", "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with LLM("demo", **options) as llm:
        expected = said(llm.generate(prompts, params, priority=priorities))
    with closing(Session(EngineConfig.create("demo", enable_multiprocessing=True, **options))) as session:
        core = session._core
        assert isinstance(core, CoreGroup)
        requests = [
            session.accept(prompt, one, priority=priority)
            for prompt, one, priority in zip(prompts, params, priorities, strict=True)
        ]
        ends: dict[str, RequestOutput] = {}
        pids = set(core.process_ids)
        for number, progress in enumerate(session.run(requests)):
            if number in (40, 160):
                pids.update(core.process_ids)
                os.kill(core.process_ids[0], signal.SIGKILL)
            if progress.finished:
                ends[progress.req_id] = progress.output()
        assert len(pids | set(core.process_ids)) == 3
    assert said([ends[accepted.request.req_id] for accepted in requests]) == expected


@pytest.mark.slow
def test_sources_are_encoded_again_when_their_core_is_killed(tmp_path: Path) -> None:
    folder, _ = write_whisper(tmp_path, vocab_size=380)
    write_tokenizer(folder, byte_level_tokenizer())
    given: Any = [{"multi_modal_data": {"audio": (tone(0.1 * number), 16_000)}} for number in range(1, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, logprobs=1)
    options = {**DEMO, "dtype": "float32", "max_num_seqs": 3}
    with LLM(folder, **options) as llm:
        expected = said(llm.generate(given, params))
    with closing(Session(EngineConfig.create(str(folder), enable_multiprocessing=True, **options))) as session:
        core = session._core
        assert isinstance(core, CoreGroup)
        (first,) = core.process_ids
        requests = [session.accept(prompt, params) for prompt in given]
        ends: dict[str, RequestOutput] = {}
        for number, progress in enumerate(session.run(requests)):
            if number == 60:
                os.kill(first, signal.SIGKILL)
            if progress.finished:
                ends[progress.req_id] = progress.output()
        assert core.process_ids != [first]
    assert said([ends[accepted.request.req_id] for accepted in requests]) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("class_name", "config_name", "fields", "task"),
    [
        ("BertModel", "BertConfig", TINY_ENCODER, "embed"),
        ("MistralModel", "MistralConfig", TINY_DECODER, "token_embed"),
        ("Qwen2ForSequenceClassification", "Qwen2Config", TINY_DECODER, "classify"),
    ],
)
def test_texts_are_pooled_again_when_their_core_is_killed(
    class_name: str, config_name: str, fields: dict[str, Any], task: str, tmp_path: Path
) -> None:
    save(random_model(class_name, config_name, **fields), tmp_path, kind="bert" if "Bert" in class_name else "last")
    texts, params = [random_text(20 + seed, seed=seed) for seed in range(40)], PoolingParams(task=task)
    options: dict[str, Any] = {"kv_cache_memory_bytes": "4MiB", "num_threads": 1, "max_num_seqs": 1}
    with LLM(tmp_path, **options) as llm:
        expected = [one.outputs.data.tolist() for one in llm.encode(texts, params, use_tqdm=False)]

    async def serve() -> list[Any]:
        engine = AsyncEngine(tmp_path, **options)
        core = engine._dispatcher.core
        assert isinstance(core, CoreGroup)
        (first,) = core.process_ids

        async def pool(text: str) -> Any:
            async for output in engine.encode(text, params):
                if is_running(first):
                    os.kill(first, signal.SIGKILL)
                found = output.outputs.data.tolist()
            return found

        try:
            # Some when the core dies, and some afterwards.
            vectors = [*await asyncio.gather(*map(pool, texts[:32])), *await asyncio.gather(*map(pool, texts[32:]))]
            assert core.process_ids != [first]
            return vectors
        finally:
            engine.shutdown()

    assert asyncio.run(serve()) == expected


@pytest.mark.slow
def test_two_engines_say_what_one_says_and_answer_for_all_their_workers() -> None:
    prompts, params, _ = varied_requests()
    options = {**DEMO, "num_threads": 2}
    with LLM("demo", **options) as llm:
        expected = said(llm.generate(prompts, params))
    with LLM("demo", data_parallel_size=2, **options) as llm:
        assert said(llm.generate(prompts, params)) == expected
        places = llm.collective_rpc(place_of)
        assert [number for number, _, _ in places] == [0, 1]
        assert [num_threads for _, num_threads, _ in places] == [1, 1]
        if len(os.sched_getaffinity(0)) >= 2:
            assert not places[0][2] & places[1][2]
        assert llm.reset_prefix_cache()


def place_of(worker: Any) -> tuple[Any, int, set[int]]:
    import torch

    return worker.config.parallel.data_parallel_rank, torch.get_num_threads(), os.sched_getaffinity(0)


@pytest.mark.slow
def test_streams_of_two_engines_with_two_workers_each_go_on_over_deaths() -> None:
    options = {**DEMO, "tensor_parallel_size": 2, "num_threads": 2}
    with LLM("demo", **options) as llm:
        params = [SamplingParams(seed=seed, max_tokens=150, ignore_eos=True) for seed in range(8)]
        expected = [output.outputs[0].token_ids for output in llm.generate(PLAYS * 2, params)]
    with closing(Session(EngineConfig.create("demo", data_parallel_size=2, **options))) as session:
        core = session._core
        assert isinstance(core, CoreGroup)
        requests = [session.accept(prompt, one) for prompt, one in zip(PLAYS * 2, params, strict=True)]
        tokens = {}
        for number, progress in enumerate(session.run(requests)):
            if number == 100:
                os.kill(_workers(core.process_ids[0])[1], signal.SIGKILL)
            if number == 300:
                os.kill(core.process_ids[1], signal.SIGKILL)
            tokens[progress.req_id] = progress.output().outputs[0].token_ids
    assert [tokens[accepted.request.req_id] for accepted in requests] == expected


def _workers(core_pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(core_pid).children()]


@pytest.mark.slow
def test_forty_streams_through_three_kills_of_workers_and_one_of_the_core(capsys: pytest.CaptureFixture[str]) -> None:
    params = [
        SamplingParams(
            max_tokens=600, ignore_eos=True, temperature=0.0 if seed % 2 else 0.9, seed=seed, logprobs=seed % 3
        )
        for seed in range(40)
    ]
    prompts = [f"{PLAYS[seed % 4]} {'so ' * seed}" for seed in range(40)]
    with LLM("demo", **DEMO) as llm:
        expected = said(llm.generate(prompts, params))

    async def serve() -> tuple[list[Any], list[str]]:
        async with AsyncEngine(
            "demo", enable_multiprocessing=True, distributed_executor_backend="mp", step_timeout_s=60, **DEMO
        ) as engine:
            core = engine._dispatcher.core
            assert isinstance(core, CoreGroup)
            num_outputs, report = 0, []

            async def collect(prompt: str, one: SamplingParams) -> RequestOutput:
                nonlocal num_outputs
                last = 0
                async for output in engine.generate(prompt, one):
                    num_outputs += 1
                    assert len(output.outputs[0].token_ids) > last
                    last = len(output.outputs[0].token_ids)
                return output

            readers = [asyncio.create_task(collect(*one)) for one in zip(prompts, params, strict=True)]
            for victim in ("worker", "worker", "core", "worker"):
                before = num_outputs
                while num_outputs < before + 1000:
                    await asyncio.sleep(0.005)
                assert not all(reader.done() for reader in readers)
                pid = core.process_ids[0] if victim == "core" else _workers(core.process_ids[0])[0]
                os.kill(pid, signal.SIGKILL)
                begin = time.monotonic()
                while is_running(pid):
                    await asyncio.sleep(0.001)
                # What was on its way is read first.
                await asyncio.sleep(0.2)
                before = num_outputs
                while num_outputs < before + 40:
                    await asyncio.sleep(0.005)
                report.append(f"{victim}: {time.monotonic() - begin:.1f} s")
            return said(await asyncio.gather(*readers)), report

    found, report = asyncio.run(serve())
    with capsys.disabled():
        print(f"\nRecovered from the death of a {', a '.join(report)}")
    assert found == expected
