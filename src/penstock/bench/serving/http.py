"""HTTP/1.1 client for thousands of streamed responses on one event loop, with connections that are kept alive.

h11 reads and writes the messages. Bytes are taken in the callback in which they arrive, not by a task that first has to
wake up, so that little of the client's own time is in what is measured.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol
from urllib.parse import urlsplit

import h11

from penstock.errors import ConfigError

Clock = Callable[[], float]
_BUFFER_BYTES = 64 * 1024
_PORTS = {"http": 80, "https": 443}
_BOTH_IDLE = {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}
_BOTH_DONE = {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}


class ConnectionLost(Exception):
    """The server closed a connection before the response was complete."""


class MalformedResponse(Exception):
    """Bytes that are not an HTTP/1.1 response, or a body that is not what its headers say."""


class ResponseReader(Protocol):
    """Receiver of one response, called as its bytes arrive. An exception of it ends the exchange and its connection.

    now: time of arrival, of the client's clock.
    """

    def begin(self, status: int, headers: Mapping[str, str], now: float) -> None:
        """Take the status and the headers, whose names are in lower case."""

    def feed(self, data: bytes, now: float) -> None:
        """Take the next bytes of the body."""

    def end(self, now: float) -> None:
        """Take the end of the body."""


@dataclass(frozen=True)
class Message:
    """A request, checked before it is sent."""

    head: h11.Request
    body: bytes


class HttpClient:
    """Client of one server. Connections are made as needed, and used again once their response is complete.

    base_url: scheme, host and port; a path is put before every request's path. headers: of every request.
    verify: whether certificates of https are checked.

    Raises ConfigError for an invalid URL or header.
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
        self._headers = {"Host": parts.netloc.rpartition("@")[2], **headers}
        self._clock = clock
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._idle: list[_Connection] = []
        # IP addresses of the host, looked up once.
        self._addresses: list[str] = []
        self._lookup = asyncio.Lock()
        self.message("GET", "/")

    def message(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})
    ) -> Message:
        """A request. body: JSON. headers: of it alone. Raises ConfigError for characters that HTTP does not allow."""
        lines = {**self._headers, **headers, "Content-Type": "application/json", "Content-Length": str(len(body))}
        target = self._path + path
        try:
            encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines.items()]
            return Message(h11.Request(method=method, target=target, headers=encoded), body)
        except (h11.LocalProtocolError, UnicodeError) as error:
            raise ConfigError(
                f"The request {method} {target!r} with the headers {', '.join({**self._headers, **headers})} is not "
                f"valid HTTP: {error}. Change --base-url, --endpoint or --header."
            ) from error

    async def exchange(self, message: Message, reader: ResponseReader) -> None:
        """Send a request, and return once the reader has the whole response.

        Raises OSError if no connection can be made, ConnectionLost, MalformedResponse, and what the reader raises. When
        it is cancelled the connection is closed.
        """
        while True:
            kept = self._kept_connection()
            connection = kept or await self._connect()
            try:
                await connection.exchange(message, reader)
            except ConnectionLost:
                # The server may close a connection that was idle just when the request is sent.
                if kept is None or connection.has_response:
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

    def _kept_connection(self) -> _Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).is_reusable:
                return connection
        return None

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
    """HTTP connection with at most one exchange at a time.

    buffer: that bytes are received into and copied from at once, so all connections share it; without one asyncio
    allocates 256 KiB for every read.
    has_response: whether bytes of the present response have arrived.
    """

    _transport: asyncio.Transport
    _reader: ResponseReader
    _ended: asyncio.Future[None] | None = None
    has_response = False

    def __init__(self, clock: Clock, buffer: memoryview) -> None:
        self._clock = clock
        self._buffer = buffer
        self._http = h11.Connection(h11.CLIENT)

    @property
    def is_reusable(self) -> bool:
        """Whether another request can be sent."""
        return self._http.states == _BOTH_IDLE and not self._transport.is_closing()

    async def exchange(self, message: Message, reader: ResponseReader) -> None:
        """Send a request, and return once the reader has the whole response."""
        if self._transport.is_closing():
            raise ConnectionLost("the server closed an idle connection")
        self._reader, self.has_response = reader, False
        self._ended = asyncio.get_running_loop().create_future()
        events = (message.head, h11.Data(message.body), h11.EndOfMessage())
        self._transport.write(b"".join(self._http.send(event) or b"" for event in events))
        await self._ended
        if self._http.states == _BOTH_DONE and not self._http.trailing_data[0]:
            self._http.start_next_cycle()

    def abort(self) -> None:
        """Close at once, without sending what is buffered."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.has_response = True
        self._take(bytes(self._buffer[:nbytes]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._take(b"")

    def _take(self, data: bytes) -> None:
        """Give the reader what arrived. data: empty at the end of the connection."""
        if self._ended is None or self._ended.done():
            self.abort()
            return
        now = self._clock()
        try:
            self._http.receive_data(data)
            while (event := self._http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Data):
                    self._reader.feed(event.data, now)
                elif isinstance(event, h11.Response):
                    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                    self._reader.begin(event.status_code, headers, now)
                elif isinstance(event, h11.EndOfMessage):
                    self._reader.end(now)
                    self._ended.set_result(None)
                    return
        except h11.RemoteProtocolError as error:
            place = "within the response" if self.has_response else "before the response"
            lost = ConnectionLost(f"the server closed the connection {place}")
            self._ended.set_exception(MalformedResponse(str(error)) if data else lost)
            self.abort()
        except Exception as error:
            self._ended.set_exception(error)
            self.abort()


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
