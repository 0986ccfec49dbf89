"""Middleware that refuses requests before their route: API keys, and limits of bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence
from contextlib import suppress

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.http.errors import ApiError
from penstock.server.http.loopback import is_loopback

# Paths for probes, and the page, which asks for the key. It has no data of its own.
_PAGE = "/"
PUBLIC_PATHS = frozenset((_PAGE, "/health", "/ready", "/ping", "/version", "/metrics"))
_KEY_HEADER = "x-api-key"
_RETRY_AFTER_S = 2
# Bounds of what is discarded of a refused body, and of the wait for more of it.
_MOST_DISCARDED_BYTES = 1 << 28
_DISCARD_IDLE_S = 2.0
# Largest body that is as small as what the server reads ahead of a connection.
_SMALL_BYTES = 1 << 16
ADMIN_PATHS = frozenset(
    (
        "/abort_requests",
        "/server_info",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/pause",
        "/resume",
        "/is_paused",
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/get_world_size",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    )
)
# Those of ADMIN_PATHS that trainers call, which send no key (`rl_routes_without_key`).
RL_PATHS = frozenset(
    (
        "/server_info",
        "/get_world_size",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/pause",
        "/resume",
        "/is_paused",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    )
)


def is_public(scope: Scope) -> bool:
    """Whether a request is a probe, or one for the page, whose path takes requests of TEI's API too."""
    path = get_route_path(scope)
    return path in PUBLIC_PATHS and (path != _PAGE or scope["method"] != "POST")


class ApiKeys:
    """Check of `Authorization: Bearer KEY`, or `x-api-key: KEY`, in UTF-8 or Latin-1.

    keys: of clients; empty lets all in. admin_key: for ADMIN_PATHS. opens_rl_paths: whether programs of this machine
    need no key for RL_PATHS.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Sequence[str], admin_key: str | None, opens_rl_paths: bool = False
    ) -> None:
        self._app = app
        self._opens_rl_paths = opens_rl_paths
        self._digests = [_digest(key) for key in keys]
        self._admin_digests = [] if admin_key is None else [_digest(admin_key)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._lets_in(scope):
            headers = Headers(scope=scope)
            is_given = "Authorization" in headers or _KEY_HEADER in headers
            what = "has a wrong API key" if is_given else "needs an API key"
            error = ApiError(
                401,
                f"The request {what}. Send the header Authorization: Bearer KEY, or {_KEY_HEADER}: KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _lets_in(self, scope: Scope) -> bool:
        if is_public(scope):
            return True
        path = get_route_path(scope)
        digests = self._admin_digests if path in ADMIN_PATHS else self._digests
        if self._opens_rl_paths and path in RL_PATHS:
            if _is_program_of_this_machine(scope):
                return True
        elif not digests:
            return True
        # All keys are compared, in constant time each.
        given = [_digest(key) for key in _given_keys(scope)]
        matches = [hmac.compare_digest(one, digest) for one in given for digest in digests]
        return any(matches)


def _is_program_of_this_machine(scope: Scope) -> bool:
    """Whether a request comes over loopback, and neither from a browser's page nor through a proxy."""
    headers = Headers(scope=scope)
    if any(name in headers for name in ("Origin", "Sec-Fetch-Site", "Forwarded", "X-Forwarded-For")):
        return False
    # A Unix socket has no client address.
    client = scope.get("client")
    if client is not None and not is_loopback(client[0]):
        return False
    # A page of a name that leads to this machine names itself. TRL connects to 0.0.0.0, which is this machine.
    host = headers.get("Host", "")
    name = (host.rpartition(":")[0] or host).strip("[]")
    return not name or name == "0.0.0.0" or is_loopback(name)


def _given_keys(scope: Scope) -> list[str]:
    """Keys of a request, as UTF-8 and as Latin-1. Clients of Anthropic's API send one by either header, or by both."""
    headers = Headers(scope=scope)
    kind, _, key = headers.get("Authorization", "").partition(" ")
    given = [key.strip(" \t")] if kind.lower() == "bearer" else []
    given += [headers[_KEY_HEADER]] if _KEY_HEADER in headers else []
    return [*given, *(key.encode("latin-1").decode("utf-8", "surrogateescape") for key in given)]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class BodyLimits:
    """Limits of request bodies: their size, whether it is declared or not, and the time that they take to arrive.

    Compressed bodies, whose size could grow without limit, are refused.

    max_bytes: of a body. max_open_bytes: of the bodies of all requests that have not ended, but for a single one. Small
    ones are taken in any case, so that large ones do not keep them out.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_open_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_open_bytes = max_open_bytes
        self._timeout_s = timeout_s
        self._open_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        encoding = headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            message = f"The body has the Content-Encoding {encoding!r}. Allowed: identity. Send it uncompressed."
            error = ApiError(415, message, headers={"Connection": "close"})
            await error.response(scope)(scope, receive, send)
            return
        declared = headers.get("Content-Length", "")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > self._max_bytes):
            await self._too_large().response(scope)(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        num_bytes, is_whole = 0, False

        async def limited_receive() -> Message:
            nonlocal num_bytes, is_whole
            # Behind the body comes the end of the connection, whenever that is.
            message = await (receive() if is_whole else self._receive_until(deadline, receive))
            is_whole = is_whole or not message.get("more_body", False)
            size = len(message.get("body", b""))
            num_bytes += size
            self._open_bytes += size
            if num_bytes > self._max_bytes:
                raise self._too_large()
            if num_bytes > _SMALL_BYTES and self._open_bytes > max(num_bytes, self._max_open_bytes):
                raise self._too_many()
            return message

        try:
            await self._app(scope, limited_receive, send)
        finally:
            self._open_bytes -= num_bytes

    async def _receive_until(self, deadline: float, receive: Receive) -> Message:
        try:
            async with asyncio.timeout_at(deadline):
                return await receive()
        except TimeoutError:
            raise request_read_timeout(self._timeout_s) from None

    def _too_large(self) -> ApiError:
        message = f"The body is too large. Allowed: {self._max_bytes:,} bytes (max_request_bytes)."
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})

    def _too_many(self) -> ApiError:
        message = (
            f"The bodies of requests that have not ended have {self._open_bytes:,} bytes. Allowed: "
            f"{self._max_open_bytes:,} (max_open_request_bytes). Try again later."
        )
        headers = {"Connection": "close", "Retry-After": str(_RETRY_AFTER_S)}
        return ApiError(429, message, code="overloaded", headers=headers)


class UnreadBodies:
    """Discard of what is left of a body after a response that closes the connection.

    A connection that is closed before is reset by what arrives then, and a client that sends all before it reads gets
    no response. Bounds: `timeout_s` from the request's begin, bytes, and the wait for more.
    """

    def __init__(self, app: ASGIApp, *, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        is_whole = closes = is_held = False

        async def watched_receive() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = is_whole or not message.get("more_body", False)
            return message

        async def held_send(message: Message) -> None:
            nonlocal closes, is_held
            if message["type"] == "http.response.start":
                closes = Headers(raw=message.get("headers", [])).get("Connection") == "close"
            elif closes and not is_whole and not message.get("more_body", False):
                is_held, message = True, {**message, "more_body": True}
            await send(message)

        await self._app(scope, watched_receive, held_send)
        if is_held:
            await _discard(receive, deadline)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive, deadline: float) -> None:
    """Take what is left of a body, within bounds."""
    left, loop = _MOST_DISCARDED_BYTES, asyncio.get_running_loop()
    with suppress(TimeoutError):
        while left > 0:
            async with asyncio.timeout_at(min(deadline, loop.time() + _DISCARD_IDLE_S)):
                message = await receive()
            if not message.get("more_body", False):
                return
            left -= len(message["body"])


def request_read_timeout(timeout_s: float) -> ApiError:
    """Response to a request that has not arrived in time."""
    message = f"The request has not arrived within {timeout_s:g} s (request_read_timeout_s). Send it again."
    return ApiError(408, message, code="request_read_timeout", headers={"Connection": "close"})
