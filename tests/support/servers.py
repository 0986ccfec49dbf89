"""HTTP servers of tests: uvicorn on a real socket, in a thread."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import uvicorn
from openai import AsyncOpenAI, OpenAI

from penstock.engine.async_engine import AsyncEngine
from penstock.server.app import create_app
from penstock.server.http.client_connections import ClientConnections, ConnectionLimits
from penstock.server.http.client_protocol import client_protocol
from penstock.server.options import ServerOptions
from support.waiting import wait_until

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Reply:
    """Response to a raw request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"}
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@dataclass(frozen=True)
class Served:
    """A running server. engine: what it serves. connections: those of its clients."""

    port: int
    engine: AsyncEngine
    connections: ClientConnections

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "unused", "max_retries": 0, **options})

    def async_client(self, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", **{"api_key": "unused", "max_retries": 0, **options})

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """Send a request; a body that is not text or bytes is sent as JSON."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
        if data is not None:
            given = {"Content-Type": "application/json", **given}
        connection = HTTPConnection(HOST, self.port, timeout=60)
        try:
            connection.request(method, path, data, given)
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self.request("POST", path, body, **headers)

    def connect(self) -> socket.socket:
        return socket.create_connection((HOST, self.port), timeout=60)


@contextmanager
def serving(
    engine: AsyncEngine, *, max_connections: int | None = None, send_buffer_bytes: int | None = None, **options: Any
) -> Iterator[Served]:
    """Serve the engine, which is shut down at the end. options: of `ServerOptions`.

    send_buffer_bytes: size of the system's buffer for what a client has not read.
    """
    app = create_app(engine, ServerOptions(**{"served_model_name": ("demo",), **options}))
    listener = socket.socket()
    listener.bind((HOST, 0))
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    given = app.state.served_model.options
    connections = ClientConnections(
        write_timeout_s=given.response_write_timeout_s,
        max_unread_bytes=given.max_unread_response_bytes,
        max_connections=max_connections,
    )
    app.add_middleware(ConnectionLimits, connections=connections, why_full=lambda num_unread: None)
    http = client_protocol(given.request_read_timeout_s, connections)
    server = uvicorn.Server(uvicorn.Config(app, http=http, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started, "the server starts")
        yield Served(listener.getsockname()[1], engine, connections)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        engine.shutdown()


def events_of(body: bytes) -> list[str]:
    """Data of the server-sent events of a whole stream."""
    return [line.removeprefix("data: ") for line in body.decode().split("\n") if line.startswith("data: ")]
