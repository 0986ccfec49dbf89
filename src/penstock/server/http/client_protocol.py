"""uvicorn's HTTP protocol, with limits for clients that send or read too slowly."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from penstock.server.http.client_connections import ClientConnection, ClientConnections, attended
from penstock.server.http.guards import request_read_timeout


def client_protocol(read_timeout_s: float, connections: ClientConnections) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, whose connections `connections` watches.

    It closes connections whose next request's headers take longer than `read_timeout_s`, before which no application
    sees the request. A connection that sends nothing before its first request is one of them. Later on it is idle, and
    uvicorn's `timeout_keep_alive` applies.
    """

    class ClientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _header_timer: asyncio.TimerHandle | None = None

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._connection = ClientConnection(self)
            self.app: ASGIApp = attended(self.app, self._connection)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connections.add(self._connection)
            self._set_header_timer()

        def data_received(self, data: bytes) -> None:
            connections.note_data(self._connection)
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._set_header_timer()
            else:
                self._end_header_timer()

        def resume_writing(self) -> None:
            self._connection.has_resumed = True
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            connections.remove(self._connection)
            self._end_header_timer()
            super().connection_lost(exc)

        def _set_header_timer(self) -> None:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(read_timeout_s, self._refuse)

        def _end_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _refuse(self) -> None:
            if not self.transport.is_closing():
                response = request_read_timeout(read_timeout_s).response({"type": "http", "path": ""})
                lines = [b"HTTP/1.1 408 Request Timeout", *(b"%s: %s" % header for header in response.raw_headers)]
                self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
                self.transport.close()

    return ClientProtocol
