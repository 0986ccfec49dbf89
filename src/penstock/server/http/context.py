"""Request ids, access log and errors of every HTTP request."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.http.errors import api_error

logger = logging.getLogger("penstock.server.requests")

REQUEST_ID_HEADER = "X-Request-Id"
_VALID_ID = re.compile(r"[\x21-\x7e]{1,256}")
_STATE_KEY = "penstock_request_id"


def request_id_of(scope: Scope) -> str:
    """Id of the HTTP request: its header X-Request-Id, or one of our own."""
    request_id: str = scope["state"][_STATE_KEY]
    return request_id


class RequestContext:
    """Outermost middleware: gives each request an id, logs it, and turns exceptions into responses.

    An id of the client is used if it is 1 to 256 visible ASCII characters. root_path: as in `ServerOptions`.
    """

    def __init__(self, app: ASGIApp, *, root_path: str, logs_requests: bool) -> None:
        self._app = app
        self._root_path = root_path
        self._logs_requests = logs_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})[_STATE_KEY] = request_id
        if self._root_path:
            scope["root_path"] = self._root_path
        started_s = time.monotonic()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            response = api_error(error, request_id).response(scope)
            if status is not None:
                # The response has begun, so the connection must break for the client to notice.
                raise
            await response(scope, receive, send_with_id)
        finally:
            if self._logs_requests:
                self._log(scope, request_id, status, time.monotonic() - started_s)

    def _log(self, scope: Scope, request_id: str, status: Any, seconds: float) -> None:
        logger.info("%s %s %s status %s in %.3f s", request_id, scope["method"], scope["path"], status, seconds)
