"""Disconnects, deadlines, refusals and failures, over a fake core with scripted tokens."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, OpenAI

from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.messages import EngineRequest
from penstock.errors import EngineDead, Overloaded, PenstockError
from penstock.server.http.connection import EventStream, StreamForm, event
from support.fake_engine import FakeCore, write_model
from support.servers import Served, events_of, serving
from support.waiting import wait_until


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig.create(str(write_model(tmp_path_factory.mktemp("model"), longest_context=100_000)))


class SlowCore(FakeCore):
    """Fake core of a long context that acknowledges admissions, and whose steps can wait until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.max_model_len = 100_000
        self.go = threading.Event()
        self.on_step = lambda step: time.sleep(0.002)

    def on_admission(self, callback: Callable[[str, PenstockError | None], None]) -> None:
        self.acknowledge = callback

    def add_request(self, request: EngineRequest) -> None:
        super().add_request(request)
        self.acknowledge(request.req_id, None)

    def hold(self) -> None:
        """Let steps wait for `go`."""
        self.on_step = lambda step: self.go.wait(60) and None


@pytest.fixture
def core() -> Iterator[SlowCore]:
    core = SlowCore()
    yield core
    core.go.set()


@pytest.fixture
def server(config: EngineConfig, core: SlowCore) -> Iterator[Served]:
    engine = AsyncEngine.from_config(config, load_core=lambda config: core)
    with serving(engine) as served:
        yield served
        core.go.set()


@pytest.fixture
def client(server: Served) -> OpenAI:
    return server.client()


def post(sock: socket.socket, path: str, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)


ENDLESS: dict[str, Any] = {"prompt": "the", "max_tokens": 50_000, "ignore_eos": True}


@pytest.mark.parametrize(
    "fields", [{}, {"stream": True}, {"n": 3}, {"prompt": ["the", "fox"], "stream": True}], ids=str
)
def test_a_client_that_leaves_ends_its_requests(server: Served, core: SlowCore, fields: dict[str, Any]) -> None:
    with server.connect() as sock:
        post(sock, "/v1/completions", {**ENDLESS, **fields})
        wait_until(lambda: core.running, "it runs")
        if fields.get("stream"):
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
    wait_until(lambda: not core.running, "it is aborted")
    assert set(core.aborted) == {request.req_id for request in core.added}


def test_a_client_that_closes_a_stream_ends_its_request(client: OpenAI, core: SlowCore) -> None:
    stream = client.completions.create(
        model="demo", stream=True, extra_body={"ignore_eos": True}, prompt="the", max_tokens=50_000
    )
    assert next(iter(stream)).choices[0].index == 0
    stream.close()
    wait_until(lambda: not core.running, "it is aborted")


def test_a_slow_reader_gets_all_tokens(server: Served) -> None:
    with server.connect() as sock:
        post(
            sock,
            "/v1/completions",
            {"prompt": "the", "max_tokens": 300, "ignore_eos": True, "stream": True, "return_token_ids": True},
        )
        time.sleep(0.3)
        data = b""
        while b"[DONE]" not in data:
            data += sock.recv(100)
    chunks = [json.loads(text) for text in events_of(data.partition(b"\r\n\r\n")[2]) if text.startswith("{")]
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 300


def test_a_deadline_before_the_answer_is_a_timeout(server: Served, core: SlowCore) -> None:
    reply = server.post("/v1/completions", {**ENDLESS, "timeout": 0.05})
    assert reply.status == 408
    assert reply.error["code"] == "timeout"
    assert reply.headers["x-should-retry"] == "false"
    wait_until(lambda: not core.running)


def test_a_deadline_ends_a_stream_with_what_is_there(server: Served, core: SlowCore) -> None:
    reply = server.post("/v1/completions", {**ENDLESS, "timeout": 0.2, "stream": True})
    assert reply.status == 200
    *chunks, done = events_of(reply.body)
    assert done == "[DONE]"
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "abort"
    assert len(chunks) > 2
    wait_until(lambda: not core.running)


def test_a_request_that_is_in_time_is_not_touched(server: Served, core: SlowCore) -> None:
    reply = server.post("/v1/completions", {"prompt": "the", "max_tokens": 2, "timeout": 60})
    assert reply.json["choices"][0]["finish_reason"] == "length"
    assert core.aborted == []


def test_a_failing_request_is_a_server_error(server: Served, core: SlowCore) -> None:
    core.failing = {0}
    reply = server.post("/v1/completions", {"prompt": "the", "max_tokens": 9})
    assert reply.status == 500
    assert reply.error["message"] == "the logits are NaN"


def test_a_failure_within_a_stream_is_an_event_and_the_end(client: OpenAI, server: Served, core: SlowCore) -> None:
    core.failing, core.fail_after = {0}, 4
    core.on_step = lambda step: time.sleep(0.02)
    body = {"prompt": "the", "max_tokens": 9, "stream": True}
    reply = server.post("/v1/completions", body)
    assert reply.status == 200
    assert reply.body.decode().split("\n\n")[-2].startswith("event: error\ndata: ")
    assert json.loads(events_of(reply.body)[-1])["error"]["message"] == "the logits are NaN"
    stream = client.completions.create(model="demo", prompt="the", max_tokens=9, stream=True)
    assert next(stream).choices[0].finish_reason is None
    with pytest.raises(APIError, match="the logits are NaN"):
        list(stream)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_core_comes_before_the_headers(server: Served, core: SlowCore, stream: bool) -> None:
    core.refuses = lambda request: True
    reply = server.post("/v1/completions", {"prompt": "the", "stream": stream})
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"


def test_an_engine_that_died_is_unavailable(server: Served, core: SlowCore) -> None:
    def die(step: int) -> None:
        raise RuntimeError("the device is gone")

    core.on_step = die
    for stream in (False, False, True):
        reply = server.post("/v1/completions", {"prompt": "the", "stream": stream})
        assert reply.status == 503
        assert reply.error["code"] == "engine_unavailable"


def test_a_stream_whose_engine_dies_ends_with_the_error(server: Served, core: SlowCore) -> None:
    def die(step: int) -> None:
        time.sleep(0.02)
        if step > 4:
            raise RuntimeError("the device is gone")

    core.on_step = die
    reply = server.post("/v1/completions", {**ENDLESS, "stream": True})
    assert reply.status == 200
    assert json.loads(events_of(reply.body)[-1])["error"]["code"] == "engine_unavailable"


def test_the_headers_of_a_stream_come_with_the_admission(server: Served, core: SlowCore) -> None:
    core.hold()
    with server.connect() as sock:
        post(sock, "/v1/completions", {**ENDLESS, "stream": True})
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        core.go.set()
        wait_until(lambda: core.running)
    wait_until(lambda: not core.running, "it is aborted")


def test_a_request_that_is_not_admitted_is_told_when_to_retry(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(server, monkeypatch, Overloaded("There are 100 requests in the queue.", retry_after_s=2.3))
    for stream in (False, True):
        reply = server.post("/v1/completions", {"prompt": ["a", "b"], "stream": stream})
        assert reply.status == 429
        assert reply.headers["retry-after"] == "3"
        assert reply.error["type"] == "rate_limit_error"


def test_an_internal_error_shows_an_id_and_no_cause(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(server, monkeypatch, KeyError("a secret of the server"))
    for stream in (False, True):
        reply = server.post("/v1/completions", {"prompt": "a", "stream": stream}, X_Request_Id="find-me")
        assert reply.status == 500
        assert "find-me" in reply.error["message"]
        assert b"secret" not in reply.body
    assert "Request find-me failed" in caplog.text
    assert "a secret of the server" in caplog.text


def refuse(server: Served, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the engine raise this error for every request."""

    async def submit(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(server.engine, "submit", submit)


def test_two_running_requests_cannot_share_an_id(server: Served, core: SlowCore) -> None:
    with server.connect() as sock:
        post(sock, "/v1/completions", {**ENDLESS, "request_id": "same"})
        wait_until(lambda: core.running)
        reply = server.post("/v1/completions", {"prompt": "a", "request_id": "same"})
    assert reply.status == 400
    assert reply.error["param"] == "request_id"


def test_a_silent_stream_gets_comments() -> None:
    sent: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield event({"first": 1})
        await asyncio.sleep(0.25)
        yield event({"last": 1})

    async def run() -> None:
        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        async def receive() -> Any:
            await asyncio.sleep(60)

        stream = EventStream(
            events(), on_end=lambda: sent.append(b"end"), request_id="x", keep_alive_s=0.1, form=StreamForm()
        )
        await stream({"type": "http"}, receive, send)

    asyncio.run(run())
    assert sent == [
        b"",
        b'data: {"first":1}\n\n',
        b": keep-alive\n\n",
        b": keep-alive\n\n",
        b'data: {"last":1}\n\n',
        b"",
        b"end",
    ]


def test_comments_do_not_disturb_clients(config: EngineConfig, tmp_path: Path) -> None:
    core = SlowCore()
    core.on_step = lambda step: time.sleep(0.05)
    engine = AsyncEngine.from_config(config, load_core=lambda config: core)
    with serving(engine, keep_alive_interval_s=0.01) as server:
        raw = server.post("/v1/completions", {"prompt": "the", "max_tokens": 4, "stream": True}).body
        stream = server.client().completions.create(model="demo", prompt="the", max_tokens=4, seed=1, stream=True)
        text = "".join(chunk.choices[0].text for chunk in stream)
        whole = server.client().completions.create(model="demo", prompt="the", max_tokens=4, seed=1)
        assert text == whole.choices[0].text
    assert b"\n\n: keep-alive\n\n" in raw


def test_an_engine_error_has_its_cause(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(server, monkeypatch, EngineDead("The engine stopped: no memory."))
    assert "no memory" in server.post("/v1/completions", {"prompt": "a"}).error["message"]
