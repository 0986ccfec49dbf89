"""Streams over a server of prompts and a server of answers, while the processes of both are killed in turn."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import AsyncOpenAI

from penstock import LLM
from support.server_process import ServerProcess
from support.waiting import until, wait_until

# Text and log-probabilities of each token.
Answer = tuple[str, list[float]]
SMALL = ("--threads", "1", "--kv-cache-memory-bytes", "32MiB", "--max-num-seqs", "32", "--max-restarts", "20")
SCENE = "What light through yonder window breaks? It is the east, and Juliet is the sun. " * 4
NUM_WAVES, NUM_STREAMS = 5, 100
# Keeps the test from hanging: processes start again in seconds, or minutes on a machine with other work.
LONG_S = 300.0


def prompt_of(wave: int, index: int) -> str:
    """Several streams of a wave begin with one text, which no other wave has."""
    return f"Act {wave}, scene {index % 20}.\n{SCENE}\nSPEAKER {index}:\n"


def seed_of(wave: int, index: int) -> int:
    return wave * NUM_STREAMS + index


def undisturbed() -> list[list[Answer]]:
    """Answers of an engine alone, by wave."""
    with LLM("demo", num_threads=1, kv_cache_memory_bytes="32MiB") as llm:
        params = llm.get_default_sampling_params()
        numbers = [(wave, index) for wave in range(NUM_WAVES) for index in range(NUM_STREAMS)]
        outputs = llm.generate(
            [prompt_of(*one) for one in numbers],
            [
                params.clone(temperature=1.0, seed=seed_of(*one), max_tokens=16, ignore_eos=True, logprobs=1)
                for one in numbers
            ],
            use_tqdm=False,
        )
    answers = [
        (one.outputs[0].text, [_rounded(row[token].logprob) for row, token in _rows(one.outputs[0])]) for one in outputs
    ]
    return [answers[wave * NUM_STREAMS : (wave + 1) * NUM_STREAMS] for wave in range(NUM_WAVES)]


def _rows(output: Any) -> Iterator[tuple[Any, int]]:
    return zip(output.logprobs, output.token_ids, strict=True)


def _rounded(logprob: float) -> float:
    return round(logprob, 5)


async def stream(client: AsyncOpenAI, wave: int, index: int, begun: set[int]) -> Answer:
    pieces: list[str] = []
    logprobs: list[float] = []
    events = await client.completions.create(
        model="demo",
        prompt=prompt_of(wave, index),
        max_tokens=16,
        temperature=1.0,
        seed=seed_of(wave, index),
        logprobs=1,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for event in events:
        begun.add(index)
        for choice in event.choices:
            pieces.append(choice.text)
            if choice.logprobs is not None:
                logprobs += [_rounded(one) for one in choice.logprobs.token_logprobs or () if one is not None]
    return "".join(pieces), logprobs


async def run_wave(server: ServerProcess, wave: int, faults: Sequence[tuple[int, Callable[[], None]]]) -> list[Answer]:
    """Run the streams of a wave at once. faults: each once so many streams have begun."""
    begun: set[int] = set()
    async with server.async_client(timeout=2 * LONG_S) as client:
        streams = asyncio.gather(*(stream(client, wave, index, begun) for index in range(NUM_STREAMS)))
        for number, fault in faults:
            await until(lambda number=number: len(begun) >= number or streams.done(), "streams begin", LONG_S)  # type: ignore[misc]
            await asyncio.to_thread(fault)
        return list(await streams)


def kill(server: ServerProcess, role: str) -> None:
    wait_until(lambda: bool(server.processes(role)), f"the {role} runs", LONG_S)
    server.processes(role)[0].kill()


def until_busy(server: ServerProcess) -> None:
    """Wait until a server has requests."""

    def is_busy() -> bool:
        with urllib.request.urlopen(f"{server.url}/ready", timeout=LONG_S) as reply:
            return bool(json.load(reply)["num_requests"])

    wait_until(is_busy, "it has requests", LONG_S)


def kill_all(server: ServerProcess) -> None:
    launcher = psutil.Process(server.process.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    for process in processes:
        process.kill()
    server.process.wait()
    psutil.wait_procs(processes)


def num_copied(server: ServerProcess) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=LONG_S) as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(r"kv_tier_copied_bytes\S* ([\d.e+]+)", text))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []
    (tmp_path / "secret").write_text("a secret of some length")

    def start_one(name: str, *arguments: str) -> ServerProcess:
        (tmp_path / name).mkdir(exist_ok=True)
        secret, folder = str(tmp_path / "secret"), str(tmp_path / name)
        options = (*SMALL, "--kv-offload-dir", folder, "--kv-secret-file", secret, *arguments)
        started.append(ServerProcess(tmp_path / f"{name}{len(started)}.log", *options))
        started[-1].wait_until_ready(LONG_S)
        return started[-1]

    yield start_one
    for server in started:
        server.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_500_streams_survive_every_process_behind_their_front_end(start: Callable[..., ServerProcess]) -> None:
    expected = undisturbed()
    port, address = str(free_port()), f"127.0.0.1:{free_port()}"
    of_prompts = ("prompts", "--port", port, "--kv-listen", address)
    prompts = start(*of_prompts)
    answers = start(
        "answers",
        *("--kv-peers", address, "--prefill-url", f"http://127.0.0.1:{port}", "--prefill-min-bytes", "200"),
    )

    def run(wave: int, *faults: tuple[int, Callable[[], None]]) -> None:
        assert asyncio.run(run_wave(answers, wave, faults)) == expected[wave]

    def until_blocks_are_copied() -> None:
        """Wait for the end of the pause in which a server that has failed is not asked."""
        before, numbers = num_copied(answers), iter(range(10**6))

        def are_copied() -> bool:
            with answers.client().with_options(timeout=LONG_S) as client:
                client.completions.create(model="demo", prompt=f"{next(numbers)} again. {SCENE}", max_tokens=1)
            return num_copied(answers) > before

        wait_until(are_copied, "blocks are copied", LONG_S)

    run(0)
    assert num_copied(answers) > 0
    run(1, (0, lambda: until_busy(prompts)), (0, lambda: kill(prompts, "core")), (40, lambda: kill(answers, "core")))
    kill_all(prompts)
    run(2, (30, lambda: kill(answers, "core")))
    prompts = start(*of_prompts)
    until_blocks_are_copied()
    run(3, (10, lambda: kill(prompts, "broker")), (40, lambda: kill(answers, "broker")))
    until_blocks_are_copied()
    run(4, (0, lambda: until_busy(prompts)), (0, lambda: kill_all(prompts)), (60, lambda: kill(answers, "core")))
