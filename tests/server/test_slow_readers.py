"""Clients that read slowly, or nothing, and more connections than there may be."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi import FastAPI
from starlette.responses import Response
from starlette.testclient import TestClient

from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.server.http.client_connections import ClientConnection, ClientConnections, ConnectionLimits
from support.fake_engine import FakeCore, write_model
from support.server_process import ServerProcess
from support.servers import HOST, Served, serving
from support.waiting import PATIENCE_S, wait_until

LENGTH = 4000
SMALL = ("--threads", "1", "--kv-cache-memory-bytes", "32MiB")
CHAT = {"model": "demo", "logprobs": 20, "prompt": [9, 10], "n": 2, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig.create(str(write_model(tmp_path_factory.mktemp("model"), longest_context=2 * LENGTH)))


@pytest.fixture
def core() -> FakeCore:
    core = FakeCore()
    core.max_model_len = 2 * LENGTH
    return core


@pytest.fixture
def serve(config: EngineConfig, core: FakeCore) -> Callable[..., AbstractContextManager[Served]]:
    def serve_it(**options: Any) -> AbstractContextManager[Served]:
        return serving(AsyncEngine.from_config(config, lambda config: core), send_buffer_bytes=4096, **options)

    return serve_it


def ask(server: Served, **fields: Any) -> socket.socket:
    """Send a request from a client with a small buffer, which reads nothing."""
    body = json.dumps({**CHAT, **fields}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((HOST, server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    client.sendall(head.encode() + b"\r\n\r\n" + body)
    return client


def rest_of(client: socket.socket) -> bytes:
    """What a client can still read of a connection that the server ends."""
    client.settimeout(PATIENCE_S)
    received = b""
    try:
        while data := client.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    client.close()
    return received


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_takes_nothing_is_disconnected(
    serve: Callable[..., AbstractContextManager[Served]], core: FakeCore, is_stream: bool
) -> None:
    with serve(response_write_timeout_s=0.4) as server:
        client = ask(server, stream=is_stream, max_tokens=200)
        wait_until(lambda: len(server.connections) == 1 and not core.running, "the answer is there")
        wait_until(lambda: server.connections.num_unread == 1, "the answer is unread")
        wait_until(lambda: not len(server.connections), "the client is disconnected")
        wait_until(lambda: server.engine.get_num_unfinished_requests() == 0, "its request ends")
        assert server.connections.num_unread == server.connections.unread_bytes == 0
        assert b'"finish_reason":"length"' not in rest_of(client)


def test_the_requests_of_a_client_that_takes_nothing_are_aborted(
    serve: Callable[..., AbstractContextManager[Served]], core: FakeCore
) -> None:
    core.on_step = lambda step: time.sleep(0.002)
    with serve(response_write_timeout_s=0.2) as server:
        client = ask(server, stream=True, max_tokens=LENGTH)
        wait_until(lambda: len(core.aborted) == CHAT["n"], "the request is aborted")
        wait_until(lambda: server.engine.get_num_unfinished_requests() == 0, "it ends")
        client.close()


def test_a_client_that_reads_slowly_gets_everything(serve: Callable[..., AbstractContextManager[Served]]) -> None:
    with serve(response_write_timeout_s=0.4) as server:
        client = ask(server, max_tokens=100)
        client.settimeout(PATIENCE_S)
        received, begin = b"", time.monotonic()
        while b"\r\n\r\n" not in received or len(received.partition(b"\r\n\r\n")[2]) < length_of(received):
            received += client.recv(4096)
            # Four times as long as the timeout, in all.
            time.sleep(0.0 if time.monotonic() - begin > 1.6 else 0.02)
        answer = json.loads(received.partition(b"\r\n\r\n")[2])
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
        assert answer["usage"]["completion_tokens"] == 200
        client.close()


def length_of(received: bytes) -> int:
    head = received.lower().partition(b"content-length: ")[2]
    return int(head.partition(b"\r\n")[0])


def test_what_is_unread_in_all_is_bounded_and_new_requests_wait(
    serve: Callable[..., AbstractContextManager[Served]], core: FakeCore
) -> None:
    """Ten clients read nothing: those that fit stay, and the others are disconnected long before the deadline."""
    with serve(response_write_timeout_s=600, max_unread_response_bytes=600_000) as server:
        clients = [ask(server, n=1, max_tokens=400) for _ in range(10)]
        connections = server.connections
        wait_until(lambda: len(core.added) == 10 and not core.running, "all answers are finished")
        wait_until(lambda: 0 < len(connections) < 10 and 0 < connections.unread_bytes <= 600_000, "what stays fits")
        assert connections.num_unread == len(connections)
        for client in clients:
            client.close()
        wait_until(lambda: not server.connections.unread_bytes, "nothing is unread")
        assert server.post("/v1/completions", {**CHAT, "max_tokens": 1}).status == 200


class FakeProtocol:
    """uvicorn's protocol of a connection with a full buffer."""

    def __init__(self, num_bytes: int) -> None:
        self.cycle = None
        self.transport = self
        self.num_bytes = num_bytes
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def get_extra_info(self, name: str) -> None:
        return None

    def abort(self) -> None:
        self.is_aborted = True


def connected(connections: ClientConnections, *sizes: int) -> list[FakeProtocol]:
    protocols = [FakeProtocol(size) for size in sizes]
    for protocol in protocols:
        connections._open[ClientConnection(protocol)] = None
    return protocols


def test_those_that_have_taken_nothing_for_longest_go_first() -> None:
    connections = ClientConnections(write_timeout_s=60, max_unread_bytes=100)
    taking, first = connected(connections, 24, 25)
    connections.check(0.0)
    taking.num_bytes -= 1
    connections.check(1.0)
    others = connected(connections, 20, 20, 20)
    connections.check(2.0)
    assert first.is_aborted
    assert not any(one.is_aborted for one in (taking, *others))
    assert (connections.unread_bytes, connections.num_unread) == (83, 4)


def test_a_single_response_may_have_a_quarter() -> None:
    connections = ClientConnections(write_timeout_s=60, max_unread_bytes=100)
    small, large = connected(connections, 25, 26)
    connections.check(0.0)
    connections.check(1.0)
    assert (small.is_aborted, large.is_aborted) == (False, True)


def test_requests_are_refused_while_too_much_is_unread() -> None:
    connections = ClientConnections(write_timeout_s=60, max_unread_bytes=100)
    app = FastAPI()
    for path in ("/v1/completions", "/health"):
        app.add_route(path, lambda http: Response(), methods=["POST", "GET"])
    full_from = 3
    app.add_middleware(
        ConnectionLimits,
        connections=connections,
        why_full=lambda num_unread: f"{num_unread} are unread" if num_unread >= full_from else None,
    )
    client = TestClient(app)
    connections.num_unread = 2
    assert client.post("/v1/completions").status_code == 200
    connections.num_unread = 3
    refused = client.post("/v1/completions")
    assert (refused.status_code, refused.json()["error"]["message"]) == (429, "3 are unread. Try again later.")
    assert refused.headers["Retry-After"]
    assert client.get("/v1/completions").status_code == client.post("/health").status_code == 200
    connections.num_unread, connections.unread_bytes = 0, 101
    assert client.post("/v1/completions").status_code == 429


def test_silent_connections_make_room_for_others(serve: Callable[..., AbstractContextManager[Served]]) -> None:
    with serve(max_connections=8) as server:
        silent = [server.connect() for _ in range(40)]
        assert server.request("GET", "/v1/models").status == 200
        # The first ones were closed.
        assert silent[0].recv(1) == b""
        assert len(server.connections) <= 8
        for client in silent:
            client.close()


def test_while_all_connections_are_busy_only_probes_are_answered(
    serve: Callable[..., AbstractContextManager[Served]], core: FakeCore
) -> None:
    core.on_step = lambda step: time.sleep(0.002)
    with serve(max_connections=2) as server:
        busy = [ask(server, n=1, max_tokens=LENGTH) for _ in range(2)]
        wait_until(lambda: len(core.running) == 2, "both run")
        assert server.request("GET", "/version").status == 200
        refused = server.request("GET", "/v1/models")
        assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
        assert refused.headers["connection"] == "close"
        for client in busy:
            client.close()
        wait_until(lambda: len(server.connections) == 0, "they are closed")
        assert server.request("GET", "/v1/models").status == 200


def test_handshakes_that_do_not_end_make_room_for_others() -> None:
    connections = ClientConnections(write_timeout_s=60, max_unread_bytes=100, max_connections=8)
    pairs = [socket.socketpair() for _ in range(12)]
    for accepted, client in pairs:
        client.setblocking(False)
        connections.note_accepted(accepted, most_at_once=4)
    for index, (_, client) in enumerate(pairs):
        if index < 4:
            assert client.recv(1) == b""
        else:
            with pytest.raises(BlockingIOError):
                client.recv(1)
    for pair in pairs:
        for end in pair:
            end.close()


@pytest.mark.slow
def test_probes_are_answered_beside_more_silent_clients_than_there_are_descriptors(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "log", *SMALL)
    try:
        psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE, (256, 256))
        server.wait_until_ready()
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        silent = [socket.create_connection(address) for _ in range(400)]
        for _ in range(10):
            begin = time.monotonic()
            connection = HTTPConnection(*address, timeout=PATIENCE_S)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            connection.close()
            assert time.monotonic() - begin < 5.0
            silent += [socket.create_connection(address) for _ in range(40)]
        assert "no file descriptor" not in server.text
        for client in silent:
            client.close()
    finally:
        server.close()
