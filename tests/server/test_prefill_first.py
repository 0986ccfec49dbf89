"""Two servers, of which one computes prompts and the other one continues them, as one server alone would."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import State
from starlette.types import Message, Receive, Scope, Send

from penstock import AsyncEngine
from penstock.config import EngineConfig
from penstock.config.request_limits import RequestLimits
from penstock.errors import ConfigError
from penstock.server.http import prefill_first
from penstock.server.http.prefill_first import PrefillFirst
from penstock.server.options import ServerOptions
from penstock.server.responses.store import ResponseStore, StoredResponse
from penstock.server.start_checks import check_start
from support.kept_blocks import files
from support.servers import Served, serving

PLAY = "ROMEO:\n" + "What light through yonder window breaks? It is the east. " * 12
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
OPTIONS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": "32MiB", "enable_multiprocessing": True}


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


@contextmanager
def two_servers(folder: Path) -> Iterator[tuple[Served, Served]]:
    """Server of prompts, and that of answers."""
    (folder / "secret").write_text("a secret of some length")
    for name in ("prompts", "answers"):
        (folder / name).mkdir()
    options = {**OPTIONS, "kv_secret_file": str(folder / "secret"), "kv_load_policy": "always"}
    address = free_address()
    prompts = AsyncEngine("demo", kv_offload_dir=str(folder / "prompts"), kv_listen=address, **options)
    answers = AsyncEngine("demo", kv_offload_dir=str(folder / "answers"), kv_peers=address, **options)
    with (
        serving(prompts, chat_template=TEMPLATE) as first,
        serving(answers, chat_template=TEMPLATE, prefill_url=first.url, prefill_min_bytes=300) as second,
    ):
        yield first, second


def num_blocks(folder: Path) -> int:
    return len(files(folder))


def completion(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}


def text_of(served: Served, body: dict[str, Any]) -> str:
    reply = served.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    return str(reply.json["choices"][0]["text"])


@pytest.mark.slow
def test_prompts_are_computed_by_the_one_and_continued_by_the_other(tmp_path: Path) -> None:
    with serving(AsyncEngine("demo", **OPTIONS), chat_template=TEMPLATE) as alone:
        expected = [text_of(alone, completion(PLAY + name)) for name in ("JULIET:", "ROMEO:")]
        chat = {"model": "demo", "messages": [{"role": "user", "content": PLAY}], "max_tokens": 8, "temperature": 0.8}
        of_chat = alone.post("/v1/chat/completions", {**chat, "n": 2, "seed": 1}).json["choices"]
    with two_servers(tmp_path) as (prompts, answers):
        reply = answers.post("/v1/completions", completion(PLAY + "JULIET:")).json
        assert reply["choices"][0]["text"] == expected[0]
        usage = reply["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 17 > 100
        found = answers.post("/v1/chat/completions", {**chat, "n": 2, "seed": 1}).json["choices"]
        assert [one["message"]["content"] for one in found] == [one["message"]["content"] for one in of_chat]
        # A response, and one that goes on with it; the server of prompts keeps neither.
        blocks = num_blocks(tmp_path / "prompts")
        given = {"model": "demo", "max_output_tokens": 8, "temperature": 0, "input": "KING:\n" + PLAY}
        one = answers.post("/v1/responses", given).json
        assert one["usage"]["input_tokens_details"]["cached_tokens"] > 100
        assert num_blocks(tmp_path / "prompts") > blocks
        blocks = num_blocks(tmp_path / "prompts")
        two = answers.post("/v1/responses", {**given, "input": PLAY, "previous_response_id": one["id"]})
        assert two.status == 200, two.body
        assert num_blocks(tmp_path / "prompts") > blocks
        assert prompts.request("GET", f"/v1/responses/{one['id']}").status == 404
        # Short ones are computed at once, and bad ones refused with the reason.
        before = num_blocks(tmp_path / "prompts")
        assert before > 5
        assert answers.post("/v1/completions", completion("ROMEO:" * 20)).status == 200
        assert num_blocks(tmp_path / "prompts") == before
        assert answers.post("/v1/completions", completion(PLAY, temperature=-1)).status == 400
        assert answers.post("/v1/completions", "no json " * 100).status == 400
        # A server of prompts whose core is killed, and one that is gone.
        (core,) = prompts.engine._dispatcher.core.process_ids  # type: ignore[attr-defined]
        os.kill(core, signal.SIGKILL)
        assert text_of(answers, completion(PLAY + "ROMEO:")) == expected[1]


@pytest.mark.slow
def test_a_server_of_prompts_that_is_gone_is_not_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(AsyncEngine("demo", **OPTIONS)) as alone:
        expected = text_of(alone, completion(PLAY))
    (tmp_path / "blocks").mkdir()
    engine = AsyncEngine("demo", kv_offload_dir=str(tmp_path / "blocks"), **OPTIONS)
    with serving(engine, prefill_url=f"http://{free_address()}", prefill_min_bytes=300) as answers:
        for _ in range(3):
            assert text_of(answers, completion(PLAY)) == expected
    assert caplog.text.count("Prompts are computed here for 10 s") == 1


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="prefill_url='there' is not valid. Allowed: a URL"):
        ServerOptions(served_model_name=("demo",), prefill_url="there")
    options = ServerOptions(served_model_name=("demo",), prefill_url="http://there")
    with pytest.raises(ConfigError, match="prefill_url needs kv_offload_dir"):
        check_start(options, EngineConfig.create("demo"))


# What the middleware reads of the application that it is part of.
APPLICATION = SimpleNamespace(
    state=State({"request_limits": RequestLimits(max_request_values=500), "large_bodies": asyncio.Lock()})
)


class Odd:
    """Server of prompts on a socket, which answers with some bytes; with None, only to questions about its health."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer
        self.requests: list[bytes] = []
        self.is_healthy = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(head)
        if head.startswith(b"GET /base/health "):
            writer.write(b"HTTP/1.1 %d x\r\nContent-Length: 0\r\n\r\n" % (200 if self.is_healthy else 503))
        elif self._answer is not None:
            writer.write(self._answer)
        else:
            await asyncio.sleep(60)
        writer.close()


async def send(middleware: PrefillFirst, body: bytes, headers: dict[str, str] | None = None) -> list[Message]:
    """Send a completion request through the middleware; return what the application behind it receives."""
    given = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": given, "app": APPLICATION}
    half = len(body) // 2
    messages = [
        {"type": "http.request", "body": body[:half], "more_body": True},
        {"type": "http.request", "body": body[half:], "more_body": False},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    async def ignore(message: Message) -> None:
        raise AssertionError("it sends nothing itself")

    received.clear()
    await middleware(scope, receive, ignore)
    return received.copy()


received: list[Message] = []


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    received.append(await receive())
    received.append(await receive())


@pytest.mark.parametrize(
    ("answer", "fails"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", False),
        (b"HTTP/1.1 400 Bad\r\n\r\n", False),
        (b"HTTP/1.1 503 Later\r\n\r\n", True),
        (b"", True),
        (b"garbage\r\n", True),
        (b"x" * 100_000, True),
        (None, True),
    ],
    ids=["answers", "refuses", "is-not-ready", "closes", "is-no-server", "sends-no-line", "hangs"],
)
def test_requests_go_on_whatever_the_server_of_prompts_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: bytes | None, fails: bool
) -> None:
    monkeypatch.setattr(prefill_first, "_PROBE_S", 0.1)
    body = json.dumps({"prompt": "x" * 300, "max_tokens": 9, "stream": True}).encode()

    async def run() -> None:
        odd = Odd(answer)
        server = await asyncio.start_server(odd.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        middleware = PrefillFirst(app, url=f"http://127.0.0.1:{port}/base/", min_bytes=200)
        sending = asyncio.ensure_future(send(middleware, body, {"authorization": "Bearer a"}))
        if answer is None:
            # It is waited for as long as it is healthy.
            while len(odd.requests) < 4:
                await asyncio.sleep(0.01)
            assert not sending.done()
            odd.is_healthy = False
        assert b"".join(one["body"] for one in await sending) == body
        assert odd.requests[0].startswith(b"POST /base/v1/completions HTTP/1.1\r\n")
        assert b"\r\nauthorization: Bearer a\r\n" in odd.requests[0]
        num_requests = len(odd.requests)
        await send(middleware, body)
        assert (len(odd.requests) == num_requests) is fails
        # What another server has sent on, or a proxy has sent to another server before, is not sent again.
        num_requests = len(odd.requests)
        middleware._paused_until = 0.0
        await send(middleware, body, {"x-penstock-prefill": "1"})
        await send(middleware, json.dumps({"prompt": "x" * 300, "kv_transfer_params": {}}).encode())
        assert len(odd.requests) == num_requests
        server.close()

    asyncio.run(run())
    refuses = answer is not None and b"400" in answer
    assert caplog.text.count("A prompt is computed here: 127.0.0.1:") == refuses
    assert ("has answered with status 400" in caplog.text) is refuses


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response that has an answer, and one that runs."""
    store = ResponseStore(ServerOptions(served_model_name=("demo",)))
    for number, status in ((1, "completed"), (2, "in_progress")):
        store.put(StoredResponse({"id": f"resp_{number:032x}", "status": status, "output": [ANSWER]}, [QUESTION]))
    monkeypatch.setattr(APPLICATION.state, "response_store", store, raising=False)


QUESTION = {"type": "message", "role": "user", "content": "first"}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "second"}]}


def test_what_a_response_goes_on_with_is_part_of_the_prompt(stored: None) -> None:
    body = json.dumps({"input": "third", "previous_response_id": f"resp_{1:032x}"}).encode()
    found = asyncio.run(prefill_first._prompt_alone(body, "/v1/responses", APPLICATION.state))
    assert found is not None
    first, second, third = json.loads(found)["input"]
    assert (first, second) == (QUESTION, ANSWER)
    assert (third["role"], third["content"][0]["text"]) == ("user", "third")


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/v1/chat/completions",
            {"messages": [], "max_tokens": 5, "max_completion_tokens": 5, "n": 3, "stream": True, "seed": 1},
            {"messages": [], "max_completion_tokens": 1, "stream": False, "seed": 1},
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"max_tokens": 7, "n": 2, "seed": 1}, "stream_options": {}},
            {"token_ids": [1], "sampling_params": {"max_tokens": 1, "seed": 1}, "stream": False},
        ),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": 3}, None),
        (
            "/v1/responses",
            {"input": "x", "max_output_tokens": 5, "background": True, "text": {}, "stream": True, "instructions": "y"},
            {"input": "x", "max_output_tokens": 1, "store": False, "stream": False, "instructions": "y"},
        ),
        ("/v1/responses", {"input": "x", "previous_response_id": 3}, None),
        ("/v1/responses", {"input": "x", "previous_response_id": f"resp_{0:032x}"}, None),
        ("/v1/responses", {"input": 3, "previous_response_id": f"resp_{1:032x}"}, None),
        ("/v1/responses", {"input": [3], "previous_response_id": f"resp_{1:032x}"}, None),
        ("/v1/responses", {"input": "x", "previous_response_id": f"resp_{2:032x}"}, None),
        ("/v1/completions", [1], None),
    ],
)
def test_the_prompt_is_asked_for_alone(path: str, body: Any, expected: Any, stored: None) -> None:
    found = asyncio.run(prefill_first._prompt_alone(json.dumps(body).encode(), path, APPLICATION.state))
    assert (None if found is None else json.loads(found)) == expected


@pytest.mark.parametrize(
    "prompt",
    [b"[" * 30_000 + b"]" * 30_000, b"[%s]" % b",".join([b'"a"'] * 60_000), b"{", b"9" * 5000, b'"\xff"'],
    ids=["nested-deeply", "more-values-than-allowed", "no-json", "long-number", "no-text"],
)
def test_bodies_that_their_route_refuses_are_not_asked_for(prompt: bytes) -> None:
    body = b'{"prompt": %s}' % prompt
    assert asyncio.run(prefill_first._prompt_alone(body, "/v1/completions", APPLICATION.state)) is None
