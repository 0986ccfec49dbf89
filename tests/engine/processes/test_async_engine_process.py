"""`AsyncEngine` behaves alike with its core in a process of its own (the default) and in this process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch import Tensor

from penstock import LLM, AsyncEngine, EngineConfig, RequestOutput, SamplingParams, StreamingInput
from penstock.contract import StructuredOutputsParams
from penstock.engine.core.core_place import with_core_process
from penstock.engine.processes.core_group import CoreGroup
from penstock.errors import ConfigError, ContextTooLong, EngineDead, LifecycleError, TokenizerError, WorkerError
from penstock.observability.logging import LineFormatter
from penstock.runner.sampling import LogitsProcessor, LogitsRows
from support.fake_engine import FakeCore, load_fake_core, write_model
from support.leftovers import nothing_left
from support.odd_cores import stopping_and_refusing, talking
from support.waiting import PATIENCE_S, until, wait_until

LIMIT_S = 120
DEMO: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": "8MiB", "max_model_len": 256}
PARAMS = SamplingParams(max_tokens=6, seed=5)


class OnlyFives(LogitsProcessor):
    """Logits processor that allows only token 5 for requests with its argument."""

    name = "only_fives"

    def add_request(self, slot: int, params: SamplingParams, *tokens: Any) -> bool:
        return bool((params.extra_args or {}).get(self.name))

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        logits.fill_(-1e9)
        logits[:, 5] = 0.0
        return logits


def process_id(_worker: Any) -> int:
    return os.getpid()


def by_zero(_worker: Any) -> float:
    return 1 / 0


def unsendable(_worker: Any) -> Any:
    return (number for number in ())


async def last(engine: AsyncEngine, prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
    async for output in engine.generate(prompt, params, **options):
        found = output
    return found


# Both ways, in one engine each: what is promised does not depend on the place. Other tests, which look inside, have
# the core in their own process, where it also starts sooner.
@pytest.fixture(scope="module", params=[None, False], ids=["a process of its own", "this process"])
def engine(request: pytest.FixtureRequest) -> Iterator[AsyncEngine]:
    options = {} if request.param is None else {"enable_multiprocessing": request.param}
    engine = AsyncEngine("demo", logits_processors=[OnlyFives], **options, **DEMO)
    yield engine
    engine.shutdown()
    with pytest.raises(LifecycleError, match="shut down"):
        asyncio.run(engine.check_health())


def is_elsewhere(engine: AsyncEngine) -> bool:
    return asyncio.run(engine.collective_rpc(process_id)) != [os.getpid()]


@pytest.mark.one_case_quick
def test_the_core_has_a_process_of_its_own_by_default(engine: AsyncEngine, request: pytest.FixtureRequest) -> None:
    assert is_elsewhere(engine) == ("a process of its own" in request.node.callspec.id)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
REQUESTS = [
    SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, prompt_logprobs=1),
    SamplingParams(n=2, seed=3, max_tokens=6, stop=["e"]),
    SamplingParams(seed=1, max_tokens=40, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    SamplingParams(seed=2, max_tokens=4, ignore_eos=True, extra_args={"only_fives": True}),
]


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    with LLM("demo", logits_processors=[OnlyFives], **DEMO) as llm:
        return llm.generate(["ROMEO:"] * len(REQUESTS), REQUESTS, use_tqdm=False)


def test_outputs_are_those_of_an_offline_engine(engine: AsyncEngine, expected: list[RequestOutput]) -> None:
    async def serve() -> list[RequestOutput]:
        return await asyncio.gather(*(last(engine, "ROMEO:", params) for params in REQUESTS))

    found = asyncio.run(serve())
    for one, other in zip(found, expected, strict=True):
        assert [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in one.outputs] == [
            (c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in other.outputs
        ]
        # Batches of other sizes round otherwise.
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)
    assert set(json.loads(found[2].outputs[0].text)) == {"a"}
    assert found[3].outputs[0].token_ids == [5] * 4


def test_a_prompt_may_come_in_parts(engine: AsyncEngine) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=5)

    async def parts() -> AsyncGenerator[StreamingInput, None]:
        for text in ("ROMEO: ", "JULIET: "):
            yield StreamingInput(text)

    async def serve() -> tuple[RequestOutput, RequestOutput]:
        whole = await last(engine, parts(), greedy)
        begun = await last(engine, "ROMEO: ", greedy)
        return whole, begun

    whole, begun = asyncio.run(serve())
    assert whole.outputs[0].token_ids[:5] == begun.outputs[0].token_ids
    assert len(whole.outputs[0].token_ids) == 10


def test_an_abort_ends_its_request_and_cached_prefixes_are_forgotten_between_requests(engine: AsyncEngine) -> None:
    async def serve() -> None:
        for _ in range(2):
            stream = engine.generate("x" * 60, SamplingParams(max_tokens=200, ignore_eos=True), request_id="a")
            await anext(stream)
            assert not await engine.reset_prefix_cache()
            await engine.abort(["a", "unknown"])
            *_, end = [output async for output in stream]
            assert end.outputs[0].finish_reason == "abort"
        cached = (await last(engine, "x" * 60, PARAMS)).num_cached_tokens
        assert await engine.reset_prefix_cache()
        assert (await last(engine, "x" * 60, PARAMS)).num_cached_tokens == 0 < cached
        await engine.check_health()

    asyncio.run(serve())


def test_errors_keep_their_types_and_texts(engine: AsyncEngine) -> None:
    async def serve() -> None:
        with pytest.raises(
            WorkerError, match="^Rank 0 failed in by_zero: ZeroDivisionError: division by zero$"
        ) as raised:
            await engine.collective_rpc(by_zero)
        assert (raised.value.rank, raised.value.method) == (0, "by_zero")
        assert "division by zero" in str(raised.value.__cause__)
        with pytest.raises(ConfigError, match=r"^Worker has no method 'dance'\.$"):
            await engine.collective_rpc("dance")
        with pytest.raises(ContextTooLong, match="300 tokens"):
            await last(engine, {"prompt_token_ids": [7] * 300}, PARAMS)

    asyncio.run(serve())


def test_what_cannot_be_sent_is_refused_with_what_to_do(engine: AsyncEngine) -> None:
    async def serve() -> list[Any]:
        lock = threading.Lock()
        calls = engine.collective_rpc(lambda worker: 3 if lock else 4), engine.collective_rpc(unsendable)
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(serve())
    if not is_elsewhere(engine):
        assert answers[0] == [3]
        return
    for answer in answers:
        assert isinstance(answer, ConfigError)
        assert "collective_rpc cannot be sent to another process" in str(answer)
        assert "enable_multiprocessing=False" in str(answer)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig.create(str(write_model(tmp_path_factory.mktemp("model"))))


def over_fake_core(
    config: EngineConfig,
    use: Callable[[AsyncEngine, CoreGroup], Coroutine[None, None, None]],
    load_core: Callable[[EngineConfig], FakeCore] = load_fake_core,
    **options: Any,
) -> None:
    async def serve() -> None:
        own = replace(config, parallel=replace(config.parallel, **options))
        async with AsyncEngine.from_config(own, lambda config: CoreGroup(config, load_core)) as engine:
            core = engine._dispatcher.core
            assert isinstance(core, CoreGroup)
            await use(engine, core)

    asyncio.run(serve())


def test_the_end_of_a_core_that_has_nothing_to_do_is_seen(config: EngineConfig) -> None:
    async def use(engine: AsyncEngine, core: CoreGroup) -> None:
        os.kill(core.process_ids[0], signal.SIGKILL)
        await until(lambda: not engine.is_running)
        with pytest.raises(EngineDead, match="SIGKILL"):
            await engine.check_health()

    over_fake_core(config, use, max_restarts=0)


def test_a_core_that_has_nothing_to_do_is_replaced_without_being_asked(config: EngineConfig) -> None:
    async def use(engine: AsyncEngine, core: CoreGroup) -> None:
        for _ in range(2):
            (lost,) = core.process_ids
            os.kill(lost, signal.SIGKILL)
            await until(lambda lost=lost: core.process_ids != [lost] and not core.has_unfinished_requests())  # type: ignore[misc]
        await engine.check_health()
        assert (await last(engine, [9, 10], PARAMS)).finished

    over_fake_core(config, use)


def test_requests_do_not_wait_for_each_other_s_steps(config: EngineConfig) -> None:
    """A request waits for no step before it is sent to the core, and a refusal is raised in its own stream."""

    folder = Path(str(config.model.folder))

    async def use(engine: AsyncEngine, core: CoreGroup) -> None:
        stream = engine.generate([9, 10], SamplingParams(max_tokens=50, seed=1))
        await anext(stream)
        await until((folder / "stopped").exists)
        calls = asyncio.gather(
            *(
                last(engine, [9, 12 if index in (3, 5) else 11], SamplingParams(max_tokens=1, seed=1, n=index % 2 + 1))
                for index in range(16)
            ),
            return_exceptions=True,
        )
        # The core reads no messages in its second step, but all are sent to it: 8 with two samples, and one
        # before.
        (supervisor,) = core._engines
        await until(lambda: len(supervisor.requests) == 25, "all are sent")
        (folder / "go on").touch()
        found = await asyncio.wait_for(calls, PATIENCE_S)
        refused = [index for index, one in enumerate(found) if isinstance(one, ContextTooLong)]
        assert refused == [3, 5]
        assert all(index in refused or one.finished for index, one in enumerate(found))  # type: ignore[union-attr]
        # Their names are free again, and nothing of them is left.
        with pytest.raises(ContextTooLong, match="too small for this one"):
            await last(engine, [9, 12], PARAMS, request_id="again")
        assert (await last(engine, [9, 11], PARAMS, request_id="again")).finished
        await stream.aclose()

    over_fake_core(config, use, stopping_and_refusing)


def test_what_a_core_logs_is_logged_here_by_the_levels_of_here(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    caplog.set_level(logging.DEBUG, "penstock.engine.talking")

    async def use(engine: AsyncEngine, core: CoreGroup) -> None:
        assert (await last(engine, [9, 10], SamplingParams(max_tokens=1, seed=1))).finished
        records = [record for record in caplog.records if record.process == core.process_ids[0]]
        assert [record.getMessage() for record in records] == ["step 1 of 100%", "step 1 failed"]
        assert LineFormatter().format(records[1]).endswith("\n  ZeroDivisionError: of all things")
        assert [record.name for record in records] == ["penstock.engine.talking"] * 2
        assert (records[1].levelno, records[1].funcName) == (logging.ERROR, "talk")

    over_fake_core(config, use, talking)


def test_what_keeps_the_front_from_starting_leaves_no_process(config: EngineConfig, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    with nothing_left(), pytest.raises(TokenizerError, match="tokenizer"):
        AsyncEngine(str(folder))


def run_program(folder: Path, source: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process group of its own, as a terminal does."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    script = folder / "program.py"
    script.write_text(textwrap.dedent(source))
    return subprocess.run(
        [sys.executable, *(command or (str(script),))],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
        input=textwrap.dedent(source),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attribute", "is_here", "other"), [("None", False, "[5, 5, 5] False"), ("threading.Lock()", True, "ConfigError")]
)
def test_a_class_that_no_file_defines_is_sent_and_one_with_a_lock_keeps_the_core_here(
    tmp_path: Path, attribute: str, is_here: bool, other: str
) -> None:
    source = f"""
        import asyncio, os, threading
        from penstock import AsyncEngine, SamplingParams
        from test_async_engine_process import OnlyFives as Base, last, process_id

        class OnlyFives(Base):
            attribute = {attribute}

        async def serve(**options):
            async with AsyncEngine("demo", logits_processors=[OnlyFives], **options, **{DEMO!r}) as engine:
                params = SamplingParams(max_tokens=3, ignore_eos=True, extra_args={{"only_fives": True}})
                (output,) = (await last(engine, "x", params)).outputs
                print(output.token_ids, await engine.collective_rpc(process_id) == [os.getpid()])

        asyncio.run(serve())
        try:
            asyncio.run(serve(enable_multiprocessing=True))
        except Exception as error:
            print(type(error).__name__)
    """
    done = run_program(tmp_path, source, "-")
    assert done.stdout.split("\n")[:2] == [f"[5, 5, 5] {is_here}", other], done.stderr
    assert ("runs in this process, since the configuration cannot be sent" in done.stderr) == is_here


def test_a_program_that_chose_its_ray_cluster_keeps_the_core(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over_ray = replace(config, parallel=replace(config.parallel, distributed_executor_backend="ray"))
    for is_initialized in (False, True):
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: is_initialized))  # noqa: B023
        assert with_core_process(over_ray).parallel.has_core_process == (not is_initialized)
        assert with_core_process(config).parallel.has_core_process
    assert "runs in this process, since it has connected to a Ray cluster" in caplog.text


@pytest.mark.slow
def test_interrupts_are_for_the_program_whatever_its_core_is_doing(tmp_path: Path) -> None:
    """SIGINT reaches all processes, as Ctrl-C in a terminal does, while the engine starts or serves."""
    source = f"""
        import asyncio, os, signal, threading
        import psutil
        from penstock import AsyncEngine, SamplingParams
        from test_async_engine_process import last, process_id

        def interrupt(ended):
            while not ended.wait(0.1):
                os.killpg(0, signal.SIGINT)

        async def main():
            heard = []
            signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
            ended = threading.Event()
            threading.Thread(target=interrupt, args=(ended,), daemon=True).start()
            async with AsyncEngine("demo", **{DEMO!r}) as engine:
                before = await engine.collective_rpc(process_id)
                output = await last(engine, "x", SamplingParams(max_tokens=50, ignore_eos=True))
                is_same = await engine.collective_rpc(process_id) == before
                print(len(output.outputs[0].token_ids), is_same, len(heard) > 0)
                ended.set()

        if __name__ == "__main__":
            asyncio.run(main())
            print(psutil.Process().children())
    """
    done = run_program(tmp_path, source)
    assert done.stdout.split("\n")[:2] == ["50 True True", "[]"], done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("end", ["sys.exit(3)", "os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
@pytest.mark.slow
def test_no_core_outlives_its_program(tmp_path: Path, end: str) -> None:
    model = write_model(tmp_path / "model")
    source = f"""
        import asyncio, os, signal, sys
        from penstock import AsyncEngine, EngineConfig, SamplingParams
        from penstock.engine.processes.core_group import CoreGroup
        from support.fake_engine import load_fake_core

        async def main():
            config = EngineConfig.create({str(model)!r})
            engine = AsyncEngine.from_config(config, lambda config: CoreGroup(config, load_fake_core))
            print(engine._dispatcher.core.process_ids[0], flush=True)
            stream = engine.generate([9, 10], SamplingParams(max_tokens=50))
            await anext(stream)
            {end}

        if __name__ == "__main__":
            asyncio.run(main())
    """
    done = run_program(tmp_path, source)
    assert done.returncode == (-signal.SIGKILL if "SIGKILL" in end else 3), done.stderr
    wait_until(lambda: not psutil.pid_exists(int(done.stdout)), "the core ends with its program")
