"""HTTP client of the load generator, with real sockets."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.serving.http import ConnectionLost, HttpClient, WholeResponse, fetch
from penstock.errors import ConfigError
from support.completion_server import ServedRequest, serving


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://here", "http://", "http://here:port"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        HttpClient(url, {}, time.perf_counter)


def test_characters_that_http_does_not_allow_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"headers Host, X .*--header"):
        HttpClient("http://here", {"X": "a\r\nY: b"}, time.perf_counter)
    with pytest.raises(ConfigError, match=r"GET '/a b'.*--endpoint"):
        HttpClient("http://here", {}, time.perf_counter).message("GET", "/a b")


def test_requests_have_their_headers_and_the_path_of_the_url() -> None:
    message = HttpClient("http://here:80/base/", {"Authorization": "Bearer k"}, time.perf_counter).message(
        "POST", "/v1/x", b"{}"
    )
    assert message.head.target == b"/base/v1/x"
    assert (b"authorization", b"Bearer k") in list(message.head.headers)
    assert (b"host", b"here:80") in list(message.head.headers)
    assert (b"content-length", b"2") in list(message.head.headers)
    assert message.body == b"{}"


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
