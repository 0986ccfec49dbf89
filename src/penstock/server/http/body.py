"""Bodies of requests: read as JSON within the limits of requests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import State
from starlette.responses import Response

from penstock.config.request_limits import RequestLimits
from penstock.engine.inputs.field_limits import check_body
from penstock.server.http.errors import ApiError, refusals
from penstock.server.http.unknown_fields import UnknownFields

# Smallest body that may have too many values.
_SMALL_BYTES = 1 << 16
# All bytes but those that begin a value, or end a string.
_OTHERS = bytes(set(range(256)) - set(b'"[{'))
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class BodyRoute(APIRoute):
    """Route that checks the sizes of its body's fields before anything is done with them.

    The number of values is checked before the body is decoded, each field before it is validated. Unknown fields that
    the server ignores are left out (`UnknownFields`).
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_limited(request: Request) -> Response:
            return await handle(_LimitedRequest(request.scope, request.receive))

        return handle_limited


class _LimitedRequest(Request):
    async def json(self) -> Any:
        body, model = await decoded(await self.body(), self.app.state), body_model(self)
        if model is None or not isinstance(body, dict):
            return body
        unknown: UnknownFields = self.app.state.unknown_fields
        return unknown.without(body, model)


async def decoded(data: bytes, state: State) -> Any:
    """A body as JSON. state: of the server's application.

    Raises ApiError and InvalidRequest beyond the limits of requests, ValueError and RecursionError for what is no JSON.
    """
    limits: RequestLimits = state.request_limits
    if len(data) < _SMALL_BYTES:
        return _decoded(data, limits)
    # One at a time, so that the event loop gets its turn between them.
    async with state.large_bodies:
        return await asyncio.to_thread(_decoded, data, limits)


def body_model(request: Request) -> type[BaseModel] | None:
    """Model of the body that the request's route takes, if it has one."""
    body_field = getattr(request.scope.get("route"), "body_field", None)
    annotation = getattr(getattr(body_field, "field_info", None), "annotation", None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _decoded(data: bytes, limits: RequestLimits) -> Any:
    check_num_values(data, limits.max_request_values, limits.max_request_numbers)
    body = json.loads(data)
    if isinstance(body, dict):
        with refusals(body.keys()):
            check_body(body, limits)
    return body


def check_num_values(body: bytes, most: int, most_entries: int) -> None:
    """Check the number of values of JSON data, which is not decoded. Raises ApiError.

    most: strings, lists and objects. most_entries: entries of lists and objects together, up to one each.
    """
    # As many are in the texts, and each string counts twice.
    if len(body) < _SMALL_BYTES or (len(body.translate(None, _OTHERS)) <= most and body.count(b",") <= most_entries):
        return
    num_strings, outside = 0, b""
    if body.count(b'"') - body.count(b'\\"') > 4 * most:
        num_strings = most + 1
    else:
        outside, num_strings = _STRING.subn(b"", body)
    if num_strings + outside.count(b"[") + outside.count(b"{") > most:
        raise _too_many("values", most, "strings, lists and objects (max_request_values)")
    if outside.count(b",") > most_entries:
        raise _too_many("entries", most_entries, "numbers and other entries of lists (max_request_numbers)")


def _too_many(what: str, most: int, allowed: str) -> ApiError:
    option = allowed.rpartition("(")[2].rstrip(")")
    return ApiError(
        400,
        f"The body has too many {what}. Allowed: at most {most:,} {allowed}. Send fewer, or start the engine with a "
        f"larger {option}.",
    )
