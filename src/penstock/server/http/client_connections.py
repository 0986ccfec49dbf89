"""Open connections of a front end: their number, and what their clients have not taken of their responses."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import socket
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.http.errors import ApiError
from penstock.server.http.guards import is_public

logger = logging.getLogger(__name__)
_STATE_KEY = "penstock_connection"
_CHECK_S = 1.0
# A body is written in pieces of this size, each of which waits until the client has taken most of those before.
_PIECE_BYTES = 1 << 16
# Share of the limit of all connections that a single one may have.
_SHARE_OF_ONE = 4
_RETRY_AFTER_S = 2
# Descriptors that are left free for other files, and for connections that are accepted before others are closed.
_MOST_RESERVED = 256
_SHARE_RESERVED = 8


class Backlog(Protocol):
    """Outputs that wait for the reader of a stream. unread_bytes: estimate. has_finished: whether no more will come."""

    @property
    def unread_bytes(self) -> int: ...

    @property
    def has_finished(self) -> bool: ...


class ClientConnection:
    """Connection of a client. protocol: that of uvicorn, which has the transport.

    unread_bytes: what the client had not taken at the last look. stalled_since: since when it takes nothing, though
    there is something, in the event loop's seconds; None otherwise. is_surplus: whether it has come when all
    connections that there may be had requests.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self.backlog: Backlog | None = None
        # Rest of the message that is being written, and whether it is the response's last one.
        self.rest_bytes, self.is_last = 0, False
        self.unread_bytes = 0
        self.stalled_since: float | None = None
        self.has_resumed = False
        self.is_surplus = False
        self._last_bytes = 0

    @property
    def descriptor(self) -> int:
        """Descriptor of its socket; -1 if it has none."""
        own = self._protocol.transport.get_extra_info("socket")
        return -1 if own is None else int(own.fileno())

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        cycle = self._protocol.cycle
        return cycle is None or cycle.response_complete

    @property
    def has_finished(self) -> bool:
        """Whether the response waits for nothing but its client."""
        return self.is_idle or self.is_last or (self.backlog is not None and self.backlog.has_finished)

    def look(self, now: float) -> None:
        """Find out what the client has not taken, and whether it has taken anything since the last look."""
        transport = self._protocol.transport
        num_bytes = transport.get_write_buffer_size()
        # While a response goes on, less than a piece waits only for a moment, or is bounded.
        if not num_bytes or not (self.is_idle or transport.is_closing() or self._protocol.flow.write_paused):
            self.unread_bytes, self.stalled_since = 0, None
            return
        waiting = num_bytes + _bytes_in_system(self.descriptor)
        if self.stalled_since is None or waiting < self._last_bytes or self.has_resumed:
            self.stalled_since = now
        self._last_bytes, self.has_resumed = waiting, False
        self.unread_bytes = num_bytes + self.rest_bytes + (0 if self.backlog is None else self.backlog.unread_bytes)

    def abort(self) -> None:
        """Drop what was not sent, and close the connection; its requests end as with any client that goes away."""
        self._protocol.transport.abort()


class ClientConnections:
    """Connections of a front end.

    A client that takes nothing of its response for `write_timeout_s` is disconnected. So are those that have taken
    nothing for longest once `max_unread_bytes` wait in all, and one for which a quarter of that waits.
    max_connections: number from which on the connection that has been idle for longest is closed for a new one; None
    for no limit.
    """

    def __init__(self, *, write_timeout_s: float, max_unread_bytes: int, max_connections: int | None = None) -> None:
        self._write_timeout_s = write_timeout_s
        self.max_unread_bytes = max_unread_bytes
        self._max_connections = max_connections
        # By the last time at which they sent something, which is that of the connection at first.
        self._open: dict[ClientConnection, None] = {}
        # Accepted sockets, oldest first, whose TLS handshakes are not over; others are here for a moment.
        self._shaking_hands: dict[int, socket.socket] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.unread_bytes = 0
        self.num_unread = 0

    def __len__(self) -> int:
        return len(self._open)

    def note_accepted(self, accepted: socket.socket, most_at_once: int) -> None:
        """Note a socket that gets its connection later, and end the oldest such one if there are too many."""
        waiting = {one.fileno(): one for one in self._shaking_hands.values() if one.fileno() >= 0}
        is_full = self._max_connections is not None and len(waiting) + len(self._open) >= self._max_connections
        if is_full and len(waiting) > most_at_once:
            with suppress(OSError):
                waiting.pop(next(iter(waiting))).shutdown(socket.SHUT_RDWR)
        waiting[accepted.fileno()] = accepted
        self._shaking_hands = waiting

    def add(self, connection: ClientConnection) -> None:
        """Note a new connection, and close another one if there are too many."""
        self._shaking_hands.pop(connection.descriptor, None)
        if self._max_connections is not None and len(self._open) >= self._max_connections:
            idle = next((one for one in self._open if one.is_idle), None)
            if idle is None:
                connection.is_surplus = True
            else:
                del self._open[idle]
                idle.abort()
        self._open[connection] = None
        if self._timer is None:
            self._set_timer()

    def note_data(self, connection: ClientConnection) -> None:
        """Note that a client has sent something."""
        if self._open.pop(connection, self) is None:
            self._open[connection] = None

    def remove(self, connection: ClientConnection) -> None:
        self._open.pop(connection, None)

    def check(self, now: float) -> None:
        """Disconnect clients that take too little. now: the event loop's time."""
        stalled = []
        for connection in self._open:
            connection.look(now)
            if connection.stalled_since is not None:
                stalled.append((connection.stalled_since, connection))
        stalled.sort(key=lambda one: one[0])
        unread_bytes = sum(connection.unread_bytes for _, connection in stalled)
        num_unread = num_late = num_large = 0
        for since, connection in stalled:
            is_late = now - since >= self._write_timeout_s
            is_over = max(unread_bytes, _SHARE_OF_ONE * connection.unread_bytes) > self.max_unread_bytes
            if is_late or (is_over and now > since):
                num_late += is_late
                num_large += not is_late
                unread_bytes -= connection.unread_bytes
                connection.abort()
            else:
                num_unread += connection.has_finished
        self.unread_bytes, self.num_unread = unread_bytes, num_unread
        if num_late:
            logger.warning(
                "%d clients have taken nothing of their responses for %g s (response_write_timeout_s): they are "
                "disconnected, and their requests end",
                num_late,
                self._write_timeout_s,
            )
        if num_large:
            logger.warning(
                "%d clients that take nothing of their responses are disconnected, and their requests end: more than "
                "max_unread_response_bytes=%d wait for clients",
                num_large,
                self.max_unread_bytes,
            )

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(_CHECK_S, self._write_timeout_s / 4), self._check)

    def _check(self) -> None:
        self._timer = None
        self.check(asyncio.get_running_loop().time())
        if self._open:
            self._set_timer()


def attended(app: ASGIApp, connection: ClientConnection) -> ASGIApp:
    """Application of one connection: its requests know the connection, and bodies are written in pieces."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_pieces(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= _PIECE_BYTES:
                await send(message)
                return
            connection.is_last = not message.get("more_body", False)
            for begin in range(0, len(body), _PIECE_BYTES):
                connection.rest_bytes = len(body) - begin
                is_end = connection.is_last and connection.rest_bytes <= _PIECE_BYTES
                piece = body[begin : begin + _PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": not is_end})
            connection.rest_bytes = 0

        scope.setdefault("state", {})[_STATE_KEY] = connection
        try:
            await app(scope, receive, send_in_pieces)
        finally:
            connection.backlog, connection.rest_bytes, connection.is_last = None, 0, False

    return answer


def note_backlog(scope: Scope, backlog: Backlog | None) -> None:
    """Note whose outputs the response to this request waits for."""
    connection: ClientConnection | None = scope.get("state", {}).get(_STATE_KEY)
    if connection is not None:
        connection.backlog = backlog


class ConnectionLimits:
    """Middleware that refuses requests, other than probes, on surplus connections, and while too much is unread.

    why_full: says why the queue has no room when this many answers, which have ended, are unread; None if it has.
    """

    def __init__(self, app: ASGIApp, *, connections: ClientConnections, why_full: Callable[[int], str | None]) -> None:
        self._app = app
        self._connections = connections
        self._why_full = why_full

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" and not is_public(scope) else None
        await (self._app if error is None else error.response(scope))(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        connection: ClientConnection | None = scope.get("state", {}).get(_STATE_KEY)
        headers = {"Retry-After": str(_RETRY_AFTER_S)}
        if connection is not None and connection.is_surplus:
            message = "The server has as many connections as its limit of open files allows. Try again later."
            return ApiError(503, message, code="too_many_connections", headers={**headers, "Connection": "close"})
        if scope["method"] != "POST":
            return None
        connections = self._connections
        why = self._why_full(connections.num_unread) if connections.num_unread else None
        if connections.unread_bytes > connections.max_unread_bytes:
            why = f"{connections.unread_bytes:,} bytes of responses wait for clients that read slowly"
        return None if why is None else ApiError(429, f"{why}. Try again later.", code="overloaded", headers=headers)


class PacedListener(socket.socket):
    """Listening socket that gives few connections at a time, so that the event loop can close others for them."""

    most_at_once = _MOST_RESERVED
    connections: ClientConnections | None = None
    _num_accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self._num_accepted >= self.most_at_once:
            raise BlockingIOError
        if self._num_accepted == 0:
            asyncio.get_running_loop().call_soon(self._begin)
        self._num_accepted += 1
        accepted, address = super().accept()
        if self.connections is not None:
            self.connections.note_accepted(accepted, self.most_at_once)
        return accepted, address

    def _begin(self) -> None:
        self._num_accepted = 0


def connections_of_limit(num_open: int) -> tuple[int | None, int]:
    """Connections that the limit of open files leaves room for, None if there is none, and how many at a time.

    num_open: other open files.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return None, _MOST_RESERVED
    reserved = min(_MOST_RESERVED, limit // _SHARE_RESERVED)
    return max(1, limit - num_open - reserved), max(1, reserved // 4)


def _bytes_in_system(descriptor: int) -> int:
    """Bytes that the system has for the client, and that it has not acknowledged."""
    with suppress(OSError, ValueError):
        return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0\0\0\0"))[0])
    return 0
