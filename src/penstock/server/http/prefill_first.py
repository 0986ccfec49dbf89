"""Middleware that lets another server compute the prompts of long requests first, whose blocks this engine copies."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette._utils import get_route_path
from starlette.datastructures import Headers, State
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.server.http.body import decoded
from penstock.server.http.errors import ApiError
from penstock.server.responses.items import input_items

logger = logging.getLogger(__name__)
# Names of the limit of new tokens, by route. Those of tokens are in a field of their own.
_TOKENS, _RESPONSES = "/inference/v1/generate", "/v1/responses"
_LIMITS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/messages": ("max_tokens",),
    _RESPONSES: ("max_output_tokens",),
    _TOKENS: ("max_tokens",),
}
# Fields of answers, which the other server need not know.
_OF_ANSWERS = (
    *("n", "stream_options", "logprobs", "top_logprobs", "best_of", "response_format", "store", "min_tokens"),
    *("background", "include", "metadata", "text"),
)
_HEADERS = ("authorization", "x-api-key", "content-type")
# Header of the requests that are sent, which no server sends on.
_MARK = "x-penstock-prefill"
_MOST_AT_ONCE = 256
# Seconds without asking a server that has failed, and after which one that has not answered is asked for its health.
_PAUSE_S, _PROBE_S = 10.0, 10.0
# Seconds between two warnings of requests that it has refused.
_WARN_S = 60.0


class PrefillFirst:
    """Sends requests of at least so many bytes to the server of prompts, for one token, before their own route runs.

    Whatever fails there, the request goes on: its prompt is computed here then. url: of the server. min_bytes: of a
    body. Requests that a proxy has sent to another server before (`kv_transfer_params`) are left as they are.
    """

    def __init__(self, app: ASGIApp, *, url: str, min_bytes: int) -> None:
        parts = urlsplit(url)
        self._app, self._min_bytes = app, min_bytes
        self._host, self._name = parts.hostname or "", parts.netloc.rpartition("@")[2]
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._root = parts.path.rstrip("/")
        self._places = asyncio.Semaphore(_MOST_AT_ONCE)
        self._paused_until = self._warn_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = get_route_path(scope) if scope["type"] == "http" else ""
        if scope.get("method") != "POST" or path not in _LIMITS:
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        body, headers = b"".join(message.get("body", b"") for message in messages), Headers(scope=scope)
        if len(body) >= self._min_bytes and _MARK not in headers and not self._is_paused:
            wanted = await _prompt_alone(body, path, scope["app"].state)
            if wanted is not None:
                given = {name: value for name, value in headers.items() if name in _HEADERS}
                await self._ask(path, wanted, {**given, _MARK: "1"})

        async def receive_again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, receive_again, send)

    @property
    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    async def _ask(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Let the server compute a prompt; a failure is logged."""
        async with self._places:
            if self._is_paused:
                return
            try:
                if (status := await self._patiently("POST", path, body, headers)) >= 500:
                    raise ConnectionError(f"status {status}")
                # A bad request is refused by this server too, with a reason.
                if status >= 300 and time.monotonic() >= self._warn_at:
                    self._warn_at = time.monotonic() + _WARN_S
                    logger.warning("A prompt is computed here: %s has answered with status %d", self._name, status)
            except (OSError, ValueError) as error:
                shown = str(error) or type(error).__name__
                self._paused_until = time.monotonic() + _PAUSE_S
                logger.warning("Prompts are computed here for %.0f s: %s: %s", _PAUSE_S, self._name, shown)

    async def _patiently(self, *request: Any) -> int:
        """As `_status_of`, for as long as the server is healthy."""
        answer = asyncio.ensure_future(self._status_of(*request))
        try:
            while not (await asyncio.wait({answer}, timeout=_PROBE_S))[0]:
                async with asyncio.timeout(_PROBE_S):
                    if (status := await self._status_of("GET", "/health")) >= 500:
                        raise ConnectionError(f"status {status} of its health")
            return await answer
        finally:
            answer.cancel()

    async def _status_of(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> int:
        """Send a request, and read the whole answer. Raises OSError, and ValueError for what is no HTTP."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._is_tls or None)
        try:
            sent = {"Host": self._name, "Connection": "close", "Content-Length": str(len(body)), **(headers or {})}
            lines = [f"{method} {self._root}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
            await writer.drain()
            line = await reader.readline()
            if not line:
                raise ConnectionError("it has closed the connection")
            _, status, *_ = line.split(maxsplit=2)
            while await reader.read(1 << 16):
                continue
            return int(status)
        finally:
            writer.close()


async def _prompt_alone(body: bytes, path: str, state: State) -> bytes | None:
    """The request for one token; None for what its route refuses, or needs no other server.

    state: of the application, with the limits of requests and the stored responses.
    """
    try:
        request: Any = await decoded(body, state)
        # A long body takes a while.
        return await asyncio.to_thread(_for_one_token, request, path, state)
    except (ValueError, RecursionError, PenstockError, ApiError):
        return None


def _for_one_token(request: Any, path: str, state: State) -> bytes | None:
    if not isinstance(request, dict) or request.get("kv_transfer_params") is not None:
        return None
    limits = _LIMITS[path]
    asked = request.get("sampling_params", {}) if path == _TOKENS else request
    if not isinstance(asked, dict):
        return None
    one_token = {name: value for name, value in asked.items() if name not in (*_OF_ANSWERS, *limits)}
    one_token[limits[0]] = 1
    if path == _TOKENS:
        one_token = {**request, "sampling_params": one_token}
        one_token.pop("stream_options", None)
    if path == _RESPONSES:
        # The other server has no responses to go on with, and keeps none.
        before, given = one_token.pop("previous_response_id", None), one_token.get("input")
        if before is not None:
            stored = state.response_store.get(before) if isinstance(before, str) else None
            if stored is None or stored.body["status"] not in ("completed", "incomplete"):
                return None
            if not isinstance(given, (str, list)):
                return None
            one_token["input"] = [*stored.conversation, *input_items(given)]
        one_token["store"] = False
    return json.dumps({**one_token, "stream": False}).encode()
