"""Connections of clients: streams of server-sent events, and work that ends with its connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.server.http.client_connections import Backlog, note_backlog
from penstock.server.http.errors import ApiError, api_error

_Result = TypeVar("_Result")
_KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
# Status of a request whose client left, in logs.
_CLIENT_CLOSED_REQUEST = 499
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_encode = msgspec.json.Encoder().encode


def event(data: Any, name: str = "") -> bytes:
    """Server-sent event with this JSON data."""
    prefix = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (prefix, _encode(data))


def stream_error(body: dict[str, Any]) -> bytes:
    """Event of an error within a stream. body: of an error response."""
    return event(body, "error")


@dataclass(frozen=True, slots=True)
class StreamForm:
    """Form of a stream.

    error_event: event of an error after the headers, from its response's body. keep_alive: what is sent when there was
    nothing else for long; empty for streams that can have nothing between their events.
    """

    error_event: Callable[[dict[str, Any]], bytes] = stream_error
    media_type: str = "text/event-stream"
    keep_alive: bytes = _KEEP_ALIVE


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Result of `work`, which is cancelled when the client closes the connection. The body must have been read.

    Raises ApiError then.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(_CLIENT_CLOSED_REQUEST, "The client closed the connection.")
        return task.result()
    finally:
        await _end(task)
        await _end(watcher)


class EventStream(Response):
    """Stream of events, as server-sent events or in another form.

    events: the events; the generator is closed at the end, and when the client closes the connection.
    backlog: what waits for the client beyond the event that is written. on_end: called at the end.
    keep_alive_s: seconds without an event after which the form's `keep_alive` is sent; 0 sends none.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        backlog: Backlog | None = None,
        on_end: Callable[[], None],
        request_id: str,
        keep_alive_s: float,
        form: StreamForm,
    ) -> None:
        super().__init__(headers=_HEADERS, media_type=form.media_type)
        del self.headers["content-length"]
        self._events = events
        self._backlog = backlog
        self._on_end = on_end
        self._request_id = request_id
        self._keep_alive_s = keep_alive_s if form.keep_alive else 0.0
        self._form = form
        self._last_sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_backlog(scope, self._backlog)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with suppress(ApiError):
                await while_connected(receive, self._write(send))
        finally:
            await self._events.aclose()
            self._on_end()

    async def _write(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        keep_alive = asyncio.create_task(self._keep_alive(send)) if self._keep_alive_s else None
        try:
            async for data in self._events:
                self._last_sent_s = loop.time()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            body = api_error(error, self._request_id).body
            await send({"type": "http.response.body", "body": self._form.error_event(body), "more_body": True})
        finally:
            if keep_alive is not None:
                await _end(keep_alive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._last_sent_s = loop.time()
        while True:
            idle_s = loop.time() - self._last_sent_s
            if idle_s >= self._keep_alive_s:
                self._last_sent_s, idle_s = loop.time(), 0.0
                await send({"type": "http.response.body", "body": self._form.keep_alive, "more_body": True})
            await asyncio.sleep(self._keep_alive_s - idle_s)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait for its end; its error, if any, is not raised."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()
