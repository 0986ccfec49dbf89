"""Fuzzed bodies, headers and connections against a whole server: it lives, fails no request, and forgets none."""

from __future__ import annotations

import copy
import json
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import pytest

from support.server_process import ServerProcess
from support.waiting import wait_until

SMALL = ("--threads", "1", "--kv-cache-memory-bytes", "32MiB", "--max-model-len", "512")
NUM_CONNECTIONS, NUM_AT_ONCE = 300, 8
TIMEOUT_S = 20.0
# Lines of the log, other than those of tracebacks.
LOG_LINE = re.compile(r"[IW] \d\d:\d\d:\d\d ")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "ROMEO:", "max_tokens": 400, "ignore_eos": True, "n": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "stream": True, "ignore_eos": True}),
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "ROMEO:", "max_tokens": 40, "n": 2, "seed": 5, "stream": True}),
    (COMPLETIONS, {"prompt": [[5, 6], [7]], "max_tokens": 4, "logprobs": 2, "echo": True, "stop": ["x", "y"]}),
    (CHAT, {"messages": PARTS, "response_format": SCHEMA, "max_tokens": 8, "logprobs": True}),
    ("/tokenize", {"prompt": "text", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
ODD: list[Any] = [
    None, True, -1, 0, 2**63, 1e308, float("nan"), "", "\ud800", "\x00", "é" * 5000, [], {}, [[]], [None], {"": {}},
    "a" * 100_000, [0] * 10_000, {"type": "function"}, [{"role": "user"}], -(2**31), 1e-320,
]  # fmt: skip
Exchange: TypeAlias = Callable[[random.Random, socket.socket], bytes]


def odd_request(rng: random.Random) -> tuple[str, bytes]:
    """Path and body of a valid request, with some values or some bytes changed."""
    path, valid = rng.choice(REQUESTS)
    body = copy.deepcopy(valid)
    for _ in range(rng.randrange(3)):
        place = body
        while isinstance(place, (dict, list)) and place:
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
            if rng.random() < 0.6 or not isinstance(place[key], (dict, list)):
                place[key] = copy.deepcopy(rng.choice(ODD))
                break
            place = place[key]
    data = bytearray(json.dumps(body).encode())
    if rng.random() < 0.3:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return path, bytes(data)


def post(path: str, data: bytes, *headers: str) -> bytes:
    """Bytes of a request."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", "Content-Type: application/json"]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + data


def read(sock: socket.socket, patience_s: float = TIMEOUT_S) -> bytes:
    """Bytes until the server closes the connection, or is quiet."""
    sock.settimeout(patience_s)
    received = b""
    with suppress(OSError):
        while data := sock.recv(65536):
            received += data
    return received


def send_odd_body(rng: random.Random, sock: socket.socket) -> bytes:
    sock.sendall(post(*odd_request(rng), "Connection: close"))
    return read(sock)


def send_odd_headers(rng: random.Random, sock: socket.socket) -> bytes:
    odd = [
        "Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999", "Transfer-Encoding: chunked",
        "Transfer-Encoding: gzip", "Content-Type: text/plain; charset=utf-99", "Expect: 100-continue", "Upgrade: h2c",
        "X-Request-Id: \x80\xff", "Authorization: Bearer \xe9", "Host: \x00", ": none", "no colon", " folded",
        f"X-Long: {'x' * 70_000}", "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13",
        "Content-Encoding: br", "Accept: application/xml", "X-Forwarded-For: ::1, \xff", "Range: bytes=0-1",
    ]  # fmt: skip
    sock.sendall(post(*odd_request(rng), *rng.sample(odd, rng.randrange(1, 4)), "Connection: close"))
    # With some headers the server waits for more of the body.
    return read(sock, patience_s=2.0)


def send_odd_first_line(rng: random.Random, sock: socket.socket) -> bytes:
    methods = ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "\x00", "PRI", "A" * 5000]
    paths = [
        COMPLETIONS, "/v1/models", "/v1/models/%ff", "/health", "//", "*", "http://other/v1/models", "/../../passwd",
        "/" + "a" * 70_000, "?", "/\xe9", "/docs", "/openapi.json?x=%",
    ]  # fmt: skip
    version = rng.choice(["HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", ""])
    first = f"{rng.choice(methods)} {rng.choice(paths)} {version}\r\nHost: x\r\nConnection: close\r\n\r\n"
    sock.sendall(first.encode("latin-1"))
    return read(sock)


def send_odd_chunks(rng: random.Random, sock: socket.socket) -> bytes:
    path, data = odd_request(rng)
    size = f"{len(data):x}"
    sizes = [size, size, f"{size};a=b", f"{len(data) + 3:x}", "ffffffffffffffff", "-1", "g", ""]
    first = post(path, b"", "Connection: close").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    sock.sendall(first + rng.choice(sizes).encode() + b"\r\n" + data + rng.choice([b"\r\n0\r\n\r\n", b"", b"\r\n"]))
    sock.shutdown(socket.SHUT_WR)
    return read(sock)


def send_random_bytes(rng: random.Random, sock: socket.socket) -> bytes:
    sock.sendall(rng.randbytes(rng.randrange(1, 2000)))
    sock.shutdown(socket.SHUT_WR)
    return read(sock)


def send_slowly(rng: random.Random, sock: socket.socket) -> bytes:
    path, data = odd_request(rng)
    whole = post(path, data[:1000], "Connection: close")
    for start in range(0, len(whole), 40):
        sock.sendall(whole[start : start + 40])
        time.sleep(0.01)
    return read(sock)


def cut_while_sending(rng: random.Random, sock: socket.socket) -> bytes:
    whole = post(*odd_request(rng))
    sock.sendall(whole[: rng.randrange(len(whole))])
    return b""


def cut_while_reading(rng: random.Random, sock: socket.socket) -> bytes:
    path, body = rng.choice(LONG)
    sock.sendall(post(path, json.dumps(body).encode()))
    time.sleep(rng.random() * 0.3)
    sock.settimeout(0.2)
    with suppress(OSError):
        return sock.recv(rng.choice([1, 500]))
    return b""


def pipeline(rng: random.Random, sock: socket.socket) -> bytes:
    sock.sendall(b"".join(post(*odd_request(rng)) for _ in range(rng.randrange(2, 6))))
    sock.shutdown(socket.SHUT_WR)
    return read(sock)


EXCHANGES: list[Exchange] = [
    send_odd_body, send_odd_body, send_odd_headers, send_odd_first_line, send_odd_chunks, send_random_bytes,
    send_slowly, cut_while_sending, cut_while_reading, pipeline,
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("server") / "server.log", *SMALL)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


def get(server: ServerProcess, path: str) -> tuple[int, dict[str, Any]]:
    address = urlsplit(server.url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def exchange(server: ServerProcess, seed: int) -> tuple[str, bytes]:
    """One connection's name, and the bytes that came back."""
    rng = random.Random(seed)
    send = rng.choice(EXCHANGES)
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S) as sock:
        if rng.random() < 0.3:
            # Closing resets the connection.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        try:
            return f"{send.__name__} of seed {seed}", send(rng, sock)
        except (BrokenPipeError, ConnectionResetError):
            return f"{send.__name__} of seed {seed}", b""


@pytest.mark.slow
@pytest.mark.parametrize("round", range(3))
def test_hostile_connections_leave_the_server_whole(server: ServerProcess, round: int) -> None:
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        seeds = range(round * NUM_CONNECTIONS, (round + 1) * NUM_CONNECTIONS)
        replies = list(threads.map(lambda seed: exchange(server, seed), seeds))
    failed = [(name, reply[:300]) for name, reply in replies if re.search(rb"HTTP/1\.1 5\d\d |event: error", reply)]
    assert not failed
    assert sum(b"HTTP/1.1 200 " in reply for _, reply in replies) > NUM_CONNECTIONS // 10
    assert get(server, "/health")[0] == 200
    wait_until(lambda: get(server, "/ready")[1]["num_requests"] == 0, "all requests end")
    assert [line for line in server.text.splitlines() if not LOG_LINE.match(line)] == []
