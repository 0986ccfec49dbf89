"""Bodies of requests that have not ended are bounded together."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import Message, Receive, Scope, Send

from penstock.server.http.errors import ApiError
from penstock.server.http.guards import BodyLimits

SCOPE: Scope = {"type": "http", "path": "/v1/completions", "headers": []}
LARGE = 100_000


class Upload:
    """A request that sends pieces of these sizes, and then no more."""

    def __init__(self, limits: BodyLimits, *sizes: int) -> None:
        self._sizes = list(sizes)
        self._request = asyncio.ensure_future(limits(SCOPE, self._receive, _send))

    async def _receive(self) -> Message:
        if not self._sizes:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b" " * self._sizes.pop(0), "more_body": True}

    async def refusal(self) -> ApiError | None:
        """Why it is refused; None while it waits for more."""
        await asyncio.wait((self._request,), timeout=0.05)
        error = self._request.exception() if self._request.done() else None
        assert error is None or isinstance(error, ApiError)
        return error

    async def end(self) -> None:
        self._request.cancel()
        with suppress(asyncio.CancelledError):
            await self._request


async def _send(message: Message) -> None:
    raise AssertionError("there is no response")


async def _read(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["more_body"]:
        pass


def test_bodies_of_requests_that_have_not_ended_are_bounded_together() -> None:
    asyncio.run(_uploads())


async def _uploads() -> None:
    limits = BodyLimits(_read, max_bytes=4 * LARGE, max_open_bytes=3 * LARGE, timeout_s=60)
    first, second = Upload(limits, LARGE, LARGE), Upload(limits, LARGE)
    assert (await first.refusal(), await second.refusal()) == (None, None)
    refused = await Upload(limits, LARGE).refusal()
    assert refused is not None
    assert (refused.status_code, refused.code) == (429, "overloaded")
    assert "(max_open_request_bytes)" in refused.message
    assert refused.headers == {"Connection": "close", "Retry-After": "2"}
    small = Upload(limits, 1000)
    assert await small.refusal() is None
    for ended in (first, second, small):
        await ended.end()
    alone = Upload(limits, *[LARGE] * 4)
    assert await alone.refusal() is None
    await alone.end()
