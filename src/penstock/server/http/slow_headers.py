"""Time limit of a request's headers, before which no application sees the request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from penstock.server.http.guards import request_read_timeout


def protocol_with_timeout(timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which closes connections whose next request's headers take longer than `timeout_s`.

    A connection that sends nothing before its first request is one of them. Later on it is idle, and uvicorn's
    `timeout_keep_alive` applies.
    """

    class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._set_header_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._set_header_timer()
            else:
                self._end_header_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_header_timer()
            super().connection_lost(exc)

        def _set_header_timer(self) -> None:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(timeout_s, self._refuse)

        def _end_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _refuse(self) -> None:
            if not self.transport.is_closing():
                response = request_read_timeout(timeout_s).response({"type": "http", "path": ""})
                lines = [b"HTTP/1.1 408 Request Timeout", *(b"%s: %s" % header for header in response.raw_headers)]
                self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
                self.transport.close()

    return TimedProtocol
