"""HTTP/1.1 client for thousands of streamed responses on one event loop, with connections that are kept alive."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol
from urllib.parse import urlsplit

from penstock.bench.serving.http_body import BodyDecoder, BodyUntilClose, ChunkedBody, MalformedResponse, SizedBody
from penstock.errors import ConfigError

Clock = Callable[[], float]
_BUFFER_BYTES = 64 * 1024
_PORTS = {"http": 80, "https": 443}


class ConnectionLost(Exception):
    """The server closed a connection before the response was complete."""


class ResponseReader(Protocol):
    """Receiver of one response, called as its bytes arrive. What it raises ends the exchange and its connection.

    now: time of arrival, of the client's clock.
    """

    def begin(self, status: int, headers: Mapping[str, str], now: float) -> None:
        """Take the status and the headers, whose names are in lower case."""

    def feed(self, data: bytes, now: float) -> None:
        """Take the next bytes of the body."""

    def end(self, now: float) -> None:
        """Take the end of the body."""


class HttpClient:
    """Client of one server. Connections are made as needed, and used again once their response is complete.

    base_url: scheme, host and port; a path is put before every request's path. headers: of every request.
    verify: whether certificates of https are checked.

    Raises ConfigError for an invalid URL.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], clock: Clock, *, verify: bool = True) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ConfigError(f"--base-url {base_url!r} is not valid. Allowed: such as http://127.0.0.1:8000.")
        try:
            self._host, self._port = parts.hostname, parts.port or _PORTS[parts.scheme]
        except ValueError as error:
            raise ConfigError(f"--base-url {base_url!r} is not valid: {error}.") from error
        self._ssl = _ssl_context(verify=verify) if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        lines = {"Host": parts.netloc.rpartition("@")[2], **headers}
        for name, value in lines.items():
            if any(not 32 <= ord(character) < 256 for character in name + value):
                raise ConfigError(f"--header {name}={value!r} is not valid. Allowed: Latin-1 without line ends.")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._clock = clock
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._idle: list[_Connection] = []
        # IP addresses of the host, looked up once.
        self._addresses: list[str] = []
        self._lookup = asyncio.Lock()

    def message(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Bytes of a request. body: JSON."""
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{kind}\r\n".encode("latin-1") + body

    async def exchange(self, message: bytes, reader: ResponseReader) -> None:
        """Send a request, and return once the reader has the whole response.

        Raises OSError if no connection can be made, ConnectionLost, MalformedResponse, and what the reader raises. When
        it is cancelled the connection is closed.
        """
        while True:
            connection = await self._connection()
            is_fresh = not connection.was_used
            try:
                await connection.exchange(message, reader)
            except ConnectionLost:
                # The server may close a connection that was idle just when the request is sent.
                if is_fresh or connection.has_response:
                    raise
                continue
            finally:
                if connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.abort()
            return

    def close(self) -> None:
        """Close the connections that are idle."""
        while self._idle:
            self._idle.pop().abort()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return await self._connect()

    async def _connect(self) -> _Connection:
        """Connect to the first address that answers, and remember it."""
        loop = asyncio.get_running_loop()
        async with self._lookup:
            if not self._addresses:
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                self._addresses = [str(address[0]) for *_, address in found]
        refused: OSError | None = None
        for address in self._addresses:
            try:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._clock, self._buffer),
                    address,
                    self._port,
                    ssl=self._ssl,
                    server_hostname=self._host if self._ssl else None,
                )
            except OSError as error:
                refused = error
            else:
                self._addresses = [address]
                return connection
        assert refused is not None
        raise refused


class _Connection(asyncio.BufferedProtocol):
    """One connection, with at most one exchange at a time.

    buffer: that bytes are received into and copied from at once, so all connections share it; without one asyncio
    allocates 256 KiB for every read.
    was_used: whether it had an exchange. has_response: whether bytes of the present response have arrived.
    is_reusable: whether another request can be sent.
    """

    def __init__(self, clock: Clock, buffer: memoryview) -> None:
        self.was_used = False
        self.has_response = False
        self.is_reusable = False
        self._clock = clock
        self._buffer = buffer
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._ended: asyncio.Future[None] | None = None
        self._head = b""
        self._body: BodyDecoder | None = None
        self._keeps_alive = True

    async def exchange(self, message: bytes, reader: ResponseReader) -> None:
        """Send a request, and return once the reader has the whole response."""
        assert self._transport is not None
        self.is_reusable, self.has_response, self.was_used = False, False, True
        self._head, self._body, self._reader = b"", None, reader
        self._ended = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            raise ConnectionLost("the server closed an idle connection")
        self._transport.write(message)
        try:
            await self._ended
        finally:
            self._reader = None
        self.is_reusable = self._keeps_alive and not self._transport.is_closing()

    def abort(self) -> None:
        """Close at once, without sending what is buffered."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._reader is None or self._ended is None or self._ended.done():
            self.abort()
            return
        now = self._clock()
        self.has_response = True
        try:
            self._take(self._reader, bytes(self._buffer[:nbytes]), now)
        except Exception as error:
            self._ended.set_exception(error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        if self._reader is None or self._ended is None or self._ended.done():
            return
        if self._body is not None and self._body.end_of_connection():
            try:
                self._end(self._reader, self._clock())
            except Exception as error:
                self._ended.set_exception(error)
            return
        place = "within the response" if self.has_response else "before the response"
        self._ended.set_exception(ConnectionLost(f"the server closed the connection {place}"))

    def _take(self, reader: ResponseReader, data: bytes, now: float) -> None:
        if self._body is None:
            head, end, data = (self._head + data).partition(b"\r\n\r\n")
            if not end:
                self._head = head
                return
            status, headers = _parse_head(head)
            self._body = _body_decoder(headers)
            self._keeps_alive = "close" not in headers.get("connection", "").lower()
            reader.begin(status, headers, now)
        if data and (decoded := self._body.feed(data)):
            reader.feed(decoded, now)
        if self._body.is_complete:
            self._end(reader, now)

    def _end(self, reader: ResponseReader, now: float) -> None:
        assert self._ended is not None
        reader.end(now)
        self._ended.set_result(None)


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not status.isdecimal():
        raise MalformedResponse(f"{first[:60]!r} is not the status line of an HTTP/1.1 response")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(status), headers


def _body_decoder(headers: Mapping[str, str]) -> BodyDecoder:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return ChunkedBody()
    length = headers.get("content-length")
    if length is None:
        return BodyUntilClose()
    if not length.isdecimal():
        raise MalformedResponse(f"Content-Length {length!r} is not a number")
    return SizedBody(int(length))


def _ssl_context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class WholeResponse:
    """Reader that keeps a response: status, headers (names in lower case), body."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self._pieces: list[bytes] = []

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    def begin(self, status: int, headers: Mapping[str, str], now: float) -> None:
        self.status, self.headers = status, headers

    def feed(self, data: bytes, now: float) -> None:
        self._pieces.append(data)

    def end(self, now: float) -> None:
        pass


async def fetch(client: HttpClient, method: str, path: str, body: bytes = b"") -> WholeResponse:
    """Send one request. Raises the errors of `HttpClient.exchange`."""
    response = WholeResponse()
    await client.exchange(client.message(method, path, body), response)
    return response


def raise_descriptor_limit() -> None:
    """Allow as many open connections as the system lets this process have."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
