"""Call of a route within the server, through everything that a client's request passes."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope


class InnerResponse(NamedTuple):
    """Response to a call."""

    status: int
    headers: Headers
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes, api_key: str | None) -> InnerResponse:
    """Response to a POST of JSON. api_key: one of the server's, if it has any. A cancelled call ends its requests."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if api_key is not None:
        headers.append((b"x-api-key", api_key.encode()))
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
    }
    sent: list[Message] = []
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            # The connection of a call does not end before its task.
            await asyncio.get_running_loop().create_future()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *rest = sent
    return InnerResponse(start["status"], Headers(raw=start["headers"]), b"".join(one.get("body", b"") for one in rest))
