"""Counts of HTTP requests by route, method and status."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import Response, StreamingResponse

from penstock.server.metrics.http_requests import CountRequests, HttpCount, HttpCounts

router = APIRouter()


@router.get("/models/{id:path}")
async def model(id: str) -> Response:
    return Response(id, status_code=200 if id == "demo" else 404)


@router.post("/stream")
async def stream() -> Response:
    def pieces() -> Iterator[str]:
        yield from "abc"

    return StreamingResponse(pieces())


def counts_after(*requests: tuple[str, str]) -> list[HttpCount]:
    """Counts after requests of these methods and paths."""
    app, counts = FastAPI(), HttpCounts()
    messages: list[Any] = []
    app.include_router(router)
    app.add_middleware(CountRequests, counts=counts)

    async def run() -> None:
        for method, path in requests:
            messages.append({"type": "http.request", "body": b""})
            scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"x=1"}
            await app(scope, receive, send)

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None: ...

    asyncio.run(run())
    return counts.counts()


def test_a_route_with_parameters_is_one_handler() -> None:
    assert counts_after(("GET", "/models/demo"), ("GET", "/models/a/b"), ("GET", "/models/c")) == [
        HttpCount("/models/{id:path}", "GET", 200, 1),
        HttpCount("/models/{id:path}", "GET", 404, 2),
    ]


def test_a_stream_counts_once() -> None:
    assert counts_after(("POST", "/stream")) == [HttpCount("/stream", "POST", 200, 1)]


def test_labels_are_bounded_whatever_clients_send() -> None:
    paths = [("GET", f"/{number}") for number in range(50)]
    methods = [(f"M{number}", "/x") for number in range(50)]
    assert counts_after(*paths, *methods) == [HttpCount("none", "GET", 404, 50), HttpCount("none", "other", 404, 50)]


def test_counts_of_processes_add_up() -> None:
    counts = HttpCounts()
    counts.add([HttpCount("/a", "GET", 200, 2)])
    counts.add([HttpCount("/a", "GET", 200, 3), HttpCount("/a", "GET", 404, 1)])
    assert counts.counts() == [HttpCount("/a", "GET", 200, 5), HttpCount("/a", "GET", 404, 1)]
