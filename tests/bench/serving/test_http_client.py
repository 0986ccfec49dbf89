"""HTTP client of the load generator, beside h11 and with real sockets."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.serving.http import ConnectionLost, HttpClient, WholeResponse, fetch
from penstock.bench.serving.http_body import ChunkedBody, MalformedResponse, SizedBody
from penstock.errors import ConfigError
from support.completion_server import ServedRequest, serving

PIECES = st.lists(st.binary(min_size=1, max_size=20), max_size=6)


def split(data: bytes, places: Sequence[int]) -> list[bytes]:
    """Cut at places, of which each is taken modulo the length."""
    cuts = sorted({place % (len(data) + 1) for place in places})
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if begin < end]


def chunked_by_h11(pieces: Sequence[bytes]) -> bytes:
    """A body in chunked transfer coding, as h11 writes it."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    connection.next_event()
    connection.send(h11.Response(status_code=200, headers=[("Transfer-Encoding", "chunked")]))
    written = [connection.send(h11.Data(piece)) or b"" for piece in pieces]
    return b"".join(written) + (connection.send(h11.EndOfMessage()) or b"")


@given(PIECES, st.lists(st.integers(0, 500), max_size=10))
def test_a_chunked_body_is_the_same_however_it_arrives(pieces: list[bytes], places: list[int]) -> None:
    body = ChunkedBody()
    received = b"".join(body.feed(part) for part in split(chunked_by_h11(pieces), places))
    assert received == b"".join(pieces)
    assert body.is_complete


@given(PIECES, st.integers(0, 500))
def test_a_chunked_body_that_is_cut_is_not_complete(pieces: list[bytes], place: int) -> None:
    data = chunked_by_h11(pieces)
    body = ChunkedBody()
    body.feed(data[: place % len(data)])
    assert not body.end_of_connection()


def test_extensions_and_trailers_of_chunks_are_skipped() -> None:
    body = ChunkedBody()
    assert body.feed(b"3;name=value\r\nabc\r\n0\r\nTrailer: 1\r\n\r\n") == b"abc"
    assert body.is_complete


@pytest.mark.parametrize("data", [b"zz\r\n", b"0\r\n\r\nmore"])
def test_a_malformed_chunk_is_an_error(data: bytes) -> None:
    with pytest.raises(MalformedResponse):
        ChunkedBody().feed(data)


def test_bytes_after_a_sized_body_are_an_error() -> None:
    with pytest.raises(MalformedResponse, match="2 bytes follow"):
        SizedBody(3).feed(b"abcde")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://here", "http://", "http://here:port"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        HttpClient(url, {}, time.perf_counter)


def test_a_header_with_a_line_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="--header X"):
        HttpClient("http://here", {"X": "a\r\nY: b"}, time.perf_counter)


def test_requests_have_their_headers_and_the_path_of_the_url() -> None:
    message = HttpClient("http://here:80/base/", {"Authorization": "Bearer k"}, time.perf_counter).message(
        "POST", "/v1/x", b"{}"
    )
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(message)
    request = connection.next_event()
    assert isinstance(request, h11.Request)
    assert request.target == b"/base/v1/x"
    assert (b"authorization", b"Bearer k") in list(request.headers)
    assert (b"host", b"here:80") in list(request.headers)
    data = connection.next_event()
    assert isinstance(data, h11.Data)
    assert data.data == b"{}"


async def hello(request: ServedRequest) -> None:
    await request.whole(200, "hello")


async def fetches(client: HttpClient, count: int) -> list[WholeResponse]:
    return [await fetch(client, "GET", "/") for _ in range(count)]


def test_a_connection_is_kept_alive() -> None:
    async def check() -> None:
        async with serving(hello) as server:
            client = HttpClient(server.url, {}, time.perf_counter)
            responses = await fetches(client, 3)
            client.close()
            assert [response.body for response in responses] == [b"hello"] * 3
            assert server.num_connections == 1

    asyncio.run(check())


def test_a_connection_that_the_server_wants_closed_is_not_used_again() -> None:
    async def close(request: ServedRequest) -> None:
        await request.whole(200, "hello", "Connection: close")
        request.writer.close()

    async def check() -> None:
        async with serving(close) as server:
            client = HttpClient(server.url, {}, time.perf_counter)
            await fetches(client, 3)
            assert server.num_connections == 3

    asyncio.run(check())


def test_a_request_on_a_connection_that_was_closed_while_idle_is_sent_again() -> None:
    async def close_at_next(request: ServedRequest) -> None:
        if request.connection == 1 and request.number > 0:
            request.cut()
            return
        await request.whole(200, "hello")

    async def check() -> None:
        async with serving(close_at_next) as server:
            client = HttpClient(server.url, {}, time.perf_counter)
            assert [response.body for response in await fetches(client, 2)] == [b"hello"] * 2
            assert [request.connection for request in server.requests] == [1, 1, 2]
            client.close()

    asyncio.run(check())


def test_a_fresh_connection_that_is_closed_without_a_response_is_an_error() -> None:
    async def cut(request: ServedRequest) -> None:
        request.cut()

    async def check() -> None:
        async with serving(cut) as server:
            client = HttpClient(server.url, {}, time.perf_counter)
            with pytest.raises(ConnectionLost, match="before the response"):
                await fetch(client, "GET", "/")

    asyncio.run(check())


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def until_close(request: ServedRequest) -> None:
        await request.head(200)
        await request.write(b"hello")
        request.writer.close()

    async def check() -> None:
        async with serving(until_close) as server:
            client = HttpClient(server.url, {}, time.perf_counter)
            assert (await fetch(client, "GET", "/")).body == b"hello"

    asyncio.run(check())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
def test_certificates_are_checked_unless_told_otherwise(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    files = ["-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
    subprocess.run([*command, *files], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def check() -> None:
        async with serving(hello, context=context) as server:
            url = server.url.replace("http:", "https:")
            client = HttpClient(url, {}, time.perf_counter, verify=False)
            assert [response.body for response in await fetches(client, 2)] == [b"hello"] * 2
            client.close()
            with pytest.raises(ssl.SSLCertVerificationError):
                await fetch(HttpClient(url, {}, time.perf_counter), "GET", "/")

    asyncio.run(check())


def test_a_body_larger_than_the_buffer_arrives_whole() -> None:
    async def large(request: ServedRequest) -> None:
        await request.whole(200, "x" * 1_000_000)

    async def check() -> None:
        async with serving(large) as server:
            client = HttpClient(server.url, {}, time.perf_counter)
            assert {response.body for response in await fetches(client, 2)} == {b"x" * 1_000_000}
            client.close()

    asyncio.run(check())


def test_a_host_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []

    async def check() -> None:
        loop = asyncio.get_running_loop()
        look_up = loop.getaddrinfo

        async def count(host: str, *args: Any, **options: Any) -> Any:
            looked_up.append(host)
            return await look_up(host, *args, **options)

        monkeypatch.setattr(loop, "getaddrinfo", count)
        async with serving(hello) as server:
            client = HttpClient(server.url.replace("127.0.0.1", "localhost"), {}, time.perf_counter)
            await asyncio.gather(*(fetch(client, "GET", "/") for _ in range(10)))
            client.close()
            assert server.num_connections == 10

    asyncio.run(check())
    assert looked_up.count("localhost") == 1
