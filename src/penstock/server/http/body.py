"""Bodies of requests: read as JSON within the limits of requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from penstock.config.request_limits import RequestLimits
from penstock.engine.inputs.field_limits import check_body
from penstock.server.http.errors import ApiError, refusals

# Smallest body that may have too many values.
_SMALL_BYTES = 1 << 16
# All bytes but those that begin a value, or end a string.
_PLAIN = bytes(set(range(256)) - set(b'"[{'))
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class BodyRoute(APIRoute):
    """Route that checks the sizes of its body's fields before anything is done with them.

    The number of values is checked before the body is decoded, each field before it is validated.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_limited(request: Request) -> Response:
            return await handle(_LimitedRequest(request.scope, request.receive))

        return handle_limited


class _LimitedRequest(Request):
    async def json(self) -> Any:
        limits: RequestLimits = self.app.state.request_limits
        check_num_values(await self.body(), limits.max_request_values)
        body = await super().json()
        if isinstance(body, dict):
            with refusals(body.keys()):
                check_body(body, limits)
        return body


def check_num_values(body: bytes, most: int) -> None:
    """Check the number of strings, lists and objects of JSON data, which are not decoded. Raises ApiError."""
    # As many are in the texts, and each string counts twice.
    if len(body) < _SMALL_BYTES or len(body.translate(None, _PLAIN)) <= most:
        return
    num_quotes = body.count(b'"') - body.count(b'\\"')
    if num_quotes <= 4 * most:
        outside, num_strings = _STRING.subn(b"", body)
        if num_strings + outside.count(b"[") + outside.count(b"{") <= most:
            return
    raise ApiError(
        400,
        f"The body has too many values. Allowed: at most {most:,} strings, lists and objects (max_request_values). "
        "Send fewer, or start the engine with a larger max_request_values.",
    )
