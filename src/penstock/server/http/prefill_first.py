"""Middleware that lets another server compute the prompts of long requests first, whose blocks this engine copies."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)
# Names of the limit of new tokens, by route.
_LIMITS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/messages": ("max_tokens",),
}
# Fields of answers, which the other server need not know.
_OF_ANSWERS = ("n", "stream_options", "logprobs", "top_logprobs", "best_of", "response_format", "store", "min_tokens")
_HEADERS = ("authorization", "x-api-key", "content-type")
_NUM_THREADS = 64
# Seconds without asking a server that has failed, and of its answer.
_PAUSE_S, _TIMEOUT_S = 10.0, 600.0


class PrefillFirst:
    """Sends requests of at least so many bytes to the server of prompts, for one token, before their own route runs.

    Whatever fails there, the request goes on: its prompt is computed here then. url: of the server. min_bytes: of a
    body.
    """

    def __init__(self, app: ASGIApp, *, url: str, min_bytes: int) -> None:
        self._app, self._url, self._min_bytes = app, urlsplit(url), min_bytes
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "prefill-first")
        self._paused_until = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = get_route_path(scope) if scope["type"] == "http" else ""
        if scope.get("method") != "POST" or path not in _LIMITS:
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        if len(body) >= self._min_bytes and time.monotonic() >= self._paused_until:
            wanted = _prompt_alone(body, _LIMITS[path])
            if wanted is not None:
                headers = {name: value for name, value in Headers(scope=scope).items() if name in _HEADERS}
                await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, path, wanted, headers)

        async def receive_again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, receive_again, send)

    def _ask(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Let the server compute a prompt; a failure is logged."""
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.netloc, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", self._url.path.rstrip("/") + path, body, dict(headers))
            response = connection.getresponse()
            answer = response.read()
            # The same request is refused by this server too, with a reason.
            if response.status >= 500:
                raise http.client.HTTPException(f"status {response.status}: {answer[:200]!r}")
        except (OSError, http.client.HTTPException) as error:
            self._paused_until = time.monotonic() + _PAUSE_S
            logger.warning("Prompts are computed here for %.0f s: %s: %s", _PAUSE_S, self._url.netloc, error)
        finally:
            connection.close()


def _prompt_alone(body: bytes, limits: tuple[str, ...]) -> bytes | None:
    """The request for one token; None for what is no JSON object, which its route refuses."""
    try:
        request: Any = json.loads(body)
    except ValueError:
        return None
    if not isinstance(request, dict):
        return None
    for name in (*_OF_ANSWERS, *limits):
        request.pop(name, None)
    return json.dumps({**request, limits[0]: 1, "stream": False}).encode()
