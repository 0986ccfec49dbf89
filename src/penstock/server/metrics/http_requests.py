"""Counts of HTTP requests by route, method and status."""

from __future__ import annotations

from collections import Counter

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
# Labels are bounded, whatever clients send.
_NO_ROUTE = "none"
_OTHER_METHOD = "other"


class HttpCount(msgspec.Struct, frozen=True):
    """Number of HTTP requests with these labels. handler: path of the route, with the names of its parameters."""

    handler: str
    method: str
    status: int
    count: int


class HttpCounts:
    """Counts of HTTP requests."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()

    def note(self, handler: str, method: str, status: int) -> None:
        self._counts[handler, method, status] += 1

    def add(self, counts: list[HttpCount]) -> None:
        """Add the counts of another process."""
        for one in counts:
            self._counts[one.handler, one.method, one.status] += one.count

    def counts(self) -> list[HttpCount]:
        return [HttpCount(*labels, count) for labels, count in sorted(self._counts.items())]


class CountRequests:
    """Middleware that counts each request when its response begins.

    A request without a route (an unknown path, or a refusal of a middleware) has the handler "none".
    """

    def __init__(self, app: ASGIApp, *, counts: HttpCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", _NO_ROUTE)
                method = scope["method"] if scope["method"] in _METHODS else _OTHER_METHOD
                self._counts.note(route, method, message["status"])
            await send(message)

        await self._app(scope, receive, counting_send)
