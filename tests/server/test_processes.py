"""Processes of a server: what survives the loss of each, and how the server starts and ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import APIStatusError, AsyncOpenAI

from support.server_process import ServerProcess
from support.waiting import PATIENCE_S, wait_until

Answer = tuple[str, list[tuple[str, float]], int]
SMALL = ("--threads", "1", "--kv-cache-memory-bytes", "32MiB")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start_one(*arguments: str, **options: Any) -> ServerProcess:
        started.append(ServerProcess(tmp_path / f"server{len(started)}.log", *SMALL, *arguments, **options))
        started[-1].wait_until_ready()
        return started[-1]

    yield start_one
    for server in started:
        server.close()


async def answer(client: AsyncOpenAI, index: int, max_tokens: int = 60, begun: set[int] | None = None) -> Answer:
    """Text of a stream, its log-probabilities if it has any, and the number of its tokens.

    begun: gets the index with the first event.
    """
    messages: Any = [{"role": "user", "content": f"Speak, number {index}."}]
    options: dict[str, Any] = {"max_tokens": max_tokens, "seed": index, "temperature": 1.0}
    if index % 3 == 0:
        schema = {"name": "person", "schema": SCHEMA}
        options |= {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 120}
    elif index % 3 == 1:
        options |= {"logprobs": True, "top_logprobs": 2, "extra_body": {"ignore_eos": True}}
    else:
        options |= {"extra_body": {"ignore_eos": True}}
    pieces: list[str] = []
    logprobs: list[tuple[str, float]] = []
    num_tokens, reason = 0, None
    stream = await client.chat.completions.create(
        model="demo", messages=messages, stream=True, stream_options={"include_usage": True}, **options
    )
    async for chunk in stream:
        if begun is not None:
            begun.add(index)
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reason = choice.finish_reason or reason
            if choice.logprobs is not None and choice.logprobs.content is not None:
                logprobs += [(one.token, round(one.logprob, 4)) for one in choice.logprobs.content]
    assert reason in ("stop", "length"), reason
    if index % 3 == 0 and reason == "stop":
        assert json.loads("".join(pieces)).keys() == {"name", "age"}
    return "".join(pieces), logprobs, num_tokens


async def answers(
    server: ServerProcess, number: int, max_tokens: int = 60, begun: set[int] | None = None
) -> list[Answer]:
    async with server.async_client(timeout=600.0) as client:
        return list(await asyncio.gather(*(answer(client, index, max_tokens, begun) for index in range(number))))


def disturb(server: ServerProcess, faults: list[tuple[str, signal.Signals]], interval_s: float) -> None:
    """Send signals to processes of these roles, each once the server runs requests again."""
    for role, sent in faults:
        time.sleep(interval_s)
        # A process that is stopped while it starts is replaced after the timeout of a start, which is longer.
        if sent is signal.SIGSTOP:
            wait_until(lambda: get(server.url, "/ready")[0] == 200)
        wait_until(lambda role=role: bool(server.processes(role)))  # type: ignore[misc]
        server.processes(role)[0].send_signal(sent)


async def disturbed(
    server: ServerProcess, number: int, faults: list[tuple[str, signal.Signals]], interval_s: float
) -> list[Answer]:
    found, _ = await asyncio.gather(answers(server, number), asyncio.to_thread(disturb, server, faults, interval_s))
    return found


def test_streams_survive_the_broker(start: Callable[..., ServerProcess]) -> None:
    server = start("--max-num-seqs", "8")
    undisturbed = asyncio.run(answers(server, 24))
    assert asyncio.run(disturbed(server, 24, [("broker", signal.SIGKILL)], 0.3)) == undisturbed
    assert "It is started again" in server.text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_streams_survive_every_process(start: Callable[..., ServerProcess]) -> None:
    server = start(
        "--tensor-parallel-size", "2", "--max-num-seqs", "32", "--step-timeout-s", "5", "--max-restarts", "5"
    )
    undisturbed = asyncio.run(answers(server, 200))
    kill = signal.SIGKILL
    faults = [("worker", kill), ("worker", kill), ("core", kill), ("worker", kill), ("broker", kill)]
    found = asyncio.run(disturbed(server, 200, [*faults, ("core", signal.SIGSTOP)], 1.5))
    assert found == undisturbed


@pytest.mark.slow
def test_a_front_end_that_is_killed_breaks_its_own_streams_only(start: Callable[..., ServerProcess]) -> None:
    server = start("--api-server-count", "2", "--max-num-seqs", "8")
    undisturbed = asyncio.run(answers(server, 16))

    async def run() -> list[Any]:
        async def one(index: int) -> Answer:
            # A connection of its own, so that both front ends serve some.
            async with server.async_client() as client:
                return await answer(client, index)

        streams = asyncio.gather(*(one(index) for index in range(16)), return_exceptions=True)
        await asyncio.sleep(0.3)
        server.processes("front-end")[0].kill()
        return list(await streams)

    found = asyncio.run(run())
    whole = [index for index, one in enumerate(found) if not isinstance(one, BaseException)]
    assert whole, found
    assert [found[index] for index in whole] == [undisturbed[index] for index in whole]
    wait_until(lambda: len(server.processes("front-end")) == 2)
    assert asyncio.run(answers(server, 6)) == undisturbed[:6]


@pytest.mark.slow
def test_front_ends_share_stored_responses_which_survive_them(start: Callable[..., ServerProcess]) -> None:
    server = start("--api-server-count", "2")
    ids: list[str] = []
    for number in range(8):
        # Each new connection may reach either front end.
        with server.client() as client:
            previous = ids[-1] if ids else None
            response = client.responses.create(
                model="demo", input=str(number), previous_response_id=previous, max_output_tokens=8
            )
            ids.append(response.id)
    server.processes("front-end")[0].kill()
    wait_until(lambda: len(server.processes("front-end")) == 2)
    for _ in range(8):
        with server.client() as client:
            items: Any = list(client.responses.input_items.list(ids[-1], order="asc", limit=100))
            users = [item.content[0].text for item in items if item.role == "user"]
            assert users == [str(number) for number in range(8)]


@pytest.mark.slow
def test_sigterm_lets_streams_finish_and_exits_with_0(start: Callable[..., ServerProcess]) -> None:
    server = start("--max-num-seqs", "8")

    async def run() -> list[Answer]:
        async with server.async_client() as client:
            streams = [asyncio.ensure_future(answer(client, index, 400)) for index in range(12)]
            await asyncio.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            with pytest.raises(APIStatusError) as refused:
                await answer(client, 0)
            assert refused.value.status_code == 503
            assert refused.value.response.headers["Retry-After"]
            assert (await asyncio.to_thread(get, server.url, "/health"))[0] == 200
            assert (await asyncio.to_thread(get, server.url, "/ready"))[0] == 503
            return list(await asyncio.gather(*streams))

    undisturbed = asyncio.run(answers(server, 12, 400))
    assert asyncio.run(run()) == undisturbed
    assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_a_terminal_that_hangs_up_lets_streams_finish(start: Callable[..., ServerProcess]) -> None:
    # A server goes on where its parent ignores SIGHUP, such as `nohup`.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    server = start("--max-num-seqs", "8")
    signal.signal(signal.SIGHUP, before)
    undisturbed = asyncio.run(answers(server, 6, 400))
    processes = [psutil.Process(server.process.pid)]
    processes += processes[0].children(recursive=True)

    async def run() -> list[Answer]:
        begun: set[int] = set()
        streams = asyncio.ensure_future(answers(server, 6, 400, begun))
        while len(begun) < 6:
            await asyncio.sleep(0.01)
        for process in processes:
            process.send_signal(signal.SIGHUP)
        return await streams

    assert asyncio.run(run()) == undisturbed
    assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_streams_that_take_too_long_are_aborted_after_sigterm(start: Callable[..., ServerProcess]) -> None:
    server = start("--shutdown-timeout", "0.2")

    async def run() -> str | None:
        async with server.async_client() as client:
            stream = await client.completions.create(
                model="demo", prompt="A", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
            )
            reason: str | None = None
            async for chunk in stream:
                if not reason:
                    server.process.send_signal(signal.SIGTERM)
                    reason = "-"
                reason = chunk.choices[0].finish_reason or reason
            return reason

    assert asyncio.run(run()) in ("abort", "length")
    assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once(start: Callable[..., ServerProcess]) -> None:
    server = start("--shutdown-timeout", "600")
    processes = psutil.Process(server.process.pid).children(recursive=True)
    stopped = [one for one in processes if one in server.processes("core")]
    for one in stopped:
        one.suspend()
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
        body = json.dumps({"model": "demo", "prompt": "A", "max_tokens": 900})
        raw.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        wait_until(lambda: json.loads(get(server.url, "/ready")[1])["num_requests"] == 1)
        # `timeout` sends its signal twice, which is one.
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(PATIENCE_S)
    assert time.monotonic() - begin < 20.0
    _, alive = psutil.wait_procs(processes, PATIENCE_S)
    assert not alive
    assert "It is replaced" not in server.text


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why_and_exits_with_an_error(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "log", "--kv-cache-memory-bytes", "1KiB")
    try:
        assert server.process.wait(PATIENCE_S) != 0
        assert "--kv-cache-memory-bytes" in server.text
        assert "Traceback" not in server.text
    finally:
        server.close()


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = ServerProcess(tmp_path / "log", "--port", str(port))
        try:
            assert server.process.wait(PATIENCE_S) == 2
            assert f"--port {port}" in server.text or f"port={port}" in server.text
        finally:
            server.close()


@pytest.mark.slow
def test_the_server_is_live_but_not_ready_while_the_broker_is_replaced(start: Callable[..., ServerProcess]) -> None:
    server = start()
    assert get(server.url, "/ready")[0] == 200
    server.processes("broker")[0].kill()
    wait_until(lambda: get(server.url, "/ready")[0] == 503)
    assert get(server.url, "/health")[0] == 200
    wait_until(lambda: get(server.url, "/ready")[0] == 200)


@pytest.mark.slow
def test_the_server_is_dead_once_a_core_with_work_hangs_for_longer_than_a_step_may_take(
    start: Callable[..., ServerProcess],
) -> None:
    """A broker that does not run cannot replace its core, and its launcher, stopped as well, cannot replace it."""
    server = start("--step-timeout-s", "2")
    server.process.send_signal(signal.SIGSTOP)
    try:
        broker = server.processes("broker")[0]
        broker.suspend()
        wait_until(lambda: get(server.url, "/health")[0] == 503)
        assert "heartbeat" in get(server.url, "/health")[1]
        broker.resume()
        wait_until(lambda: get(server.url, "/health")[0] == 200)
    finally:
        server.process.send_signal(signal.SIGCONT)


def get(url: str, path: str) -> tuple[int, str]:
    """Status and body of a GET request."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        head, _, body = b"".join(iter(lambda: raw.recv(65536), b"")).partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


@pytest.mark.slow
def test_a_front_end_that_hangs_is_replaced(start: Callable[..., ServerProcess]) -> None:
    server = start("--step-timeout-s", "3")
    hanging = server.processes("front-end")[0]
    hanging.suspend()
    wait_until(lambda: "sent no heartbeat for 3 s" in server.text)
    wait_until(lambda: [one.pid for one in server.processes("front-end")] not in ([], [hanging.pid]))
    assert asyncio.run(answers(server, 3))


@pytest.mark.slow
def test_a_flood_is_refused_with_the_time_to_wait_and_memory_stays_flat(start: Callable[..., ServerProcess]) -> None:
    server = start("--max-num-seqs", "4", "--max-num-queued-requests", "8")
    body = json.dumps({"model": "demo", "prompt": "A" * 300, "max_tokens": 30, "ignore_eos": True})

    async def post(index: int) -> tuple[int, str | None]:
        host, _, port = server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        head = (await reader.read()).partition(b"\r\n\r\n")[0].decode()
        writer.close()
        wait = [line.partition(": ")[2] for line in head.split("\r\n") if line.lower().startswith("retry-after")]
        return int(head.split()[1]), wait[0] if wait else None

    async def flood(number: int) -> list[tuple[int, str | None]]:
        return list(await asyncio.gather(*(post(index) for index in range(number))))

    def memory() -> int:
        # The core touches new pages of its KV cache, whose size is fixed, as requests need them.
        processes = [*server.processes("front-end"), *server.processes("broker")]
        return sum(process.memory_full_info().uss for process in processes)

    asyncio.run(flood(200))
    asyncio.run(flood(200))
    before = memory()
    found = [answer for _ in range(8) for answer in asyncio.run(flood(200))]
    assert {status for status, _ in found} == {200, 429}
    assert all(wait is not None and 1 <= int(wait) <= 60 for status, wait in found if status == 429)
    assert sum(status == 200 for status, _ in found) >= 8 * 12
    assert memory() < 1.02 * before
    wait_until(lambda: json.loads(get(server.url, "/ready")[1])["num_requests"] == 0)


@pytest.mark.slow
def test_a_front_end_without_file_descriptors_says_so_once_and_goes_on(start: Callable[..., ServerProcess]) -> None:
    server = start()
    front_end = server.processes("front-end")[0]
    num_open = front_end.num_fds()
    front_end.rlimit(psutil.RLIMIT_NOFILE, (num_open + 20, num_open + 20))
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    connections = [socket.create_connection(address) for _ in range(60)]
    wait_until(lambda: "no file descriptor" in server.text)
    time.sleep(3.0)
    assert server.text.count("no file descriptor") == 1
    assert "Traceback" not in server.text
    for connection in connections:
        connection.close()
    wait_until(lambda: get(server.url, "/health")[0] == 200)
    assert asyncio.run(answers(server, 3))


@pytest.mark.slow
def test_probes_answer_head_requests(start: Callable[..., ServerProcess]) -> None:
    server = start()
    for path in ("/health", "/ready"):
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
            raw.sendall(f"HEAD {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
            reply = b"".join(iter(lambda: raw.recv(65536), b""))
        assert reply.startswith(b"HTTP/1.1 200")
        assert reply.endswith(b"\r\n\r\n")
