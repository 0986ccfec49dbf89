"""Errors of the HTTP API, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, or in the route's."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from penstock.errors import (
    AdapterNotFound,
    ChatTemplateError,
    ContextTooLong,
    EngineAsleep,
    EngineDead,
    InvalidRequest,
    LifecycleError,
    Overloaded,
    WaitTimeout,
)

logger = logging.getLogger(__name__)

# Path of a field at the beginning of an error's text, such as "messages[0].content[1]".
_PATH = re.compile(r"[a-z_]+(?:\[\d+\]|\.[a-z_]+)*")
# Absolute path of a file, beginning a word.
_FILE = re.compile(r"""(?<![\w.:/<-])(?:/[^\s/'",;:()<>\[\]{}]+){2,}""")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    424: "server_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# The messages API has names of its own for some types.
_MESSAGES_TYPES = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
# TEI's types of errors; those of other requests are "validation".
_TEI_TYPES = {
    "rate_limit_error": "overloaded",
    "server_error": "backend",
    "service_unavailable_error": "unhealthy",
}


class ApiError(HTTPException):
    """An error response. param: the client's name of the field. code: a name for programs.

    shape: of the body; None takes that of the route.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        shape: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.shape = shape
        self.message = _sendable(message)
        self.param = None if param is None else _sendable(param)
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The error as data."""
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status_code, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, scope: Scope) -> Response:
        """Response to a request, in the shape of its API."""
        path, body = get_route_path(scope), self.body
        shape = self.shape or next((shape for begin, shape in _SHAPES.items() if path.startswith(begin)), None)
        return json_response(body if shape is None else shape(body), self.status_code, self.headers)


def messages_error(body: dict[str, Any]) -> dict[str, Any]:
    """An error in the shape of Anthropic's API, from its body in OpenAI's."""
    error = body["error"]
    kind = error["code"] if error["code"] == "request_too_large" else error["type"]
    return {"type": "error", "error": {"type": _MESSAGES_TYPES.get(kind, kind), "message": error["message"]}}


def ollama_error(body: dict[str, Any]) -> dict[str, Any]:
    """An error in the shape of Ollama's API, from its body in OpenAI's."""
    return {"error": body["error"]["message"]}


def tei_error(body: dict[str, Any]) -> dict[str, Any]:
    """An error in the shape of TEI's API, from its body in OpenAI's."""
    error = body["error"]
    return {"error": error["message"], "error_type": _TEI_TYPES.get(error["type"], "validation")}


# Shapes of the errors of some routes, by the begin of their paths.
_SHAPES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "/v1/messages": messages_error,
    "/api/": ollama_error,
    "/embed": tei_error,
    "/predict": tei_error,
    "/similarity": tei_error,
}


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def api_error(error: Exception, request_id: str) -> ApiError:
    """Response to an exception; the cause of an internal one is logged with the request's id, and not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, _http_message(error), headers=error.headers)
    if isinstance(error, InvalidRequest):
        return invalid_request(error)
    if isinstance(error, Overloaded):
        retry_after = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return ApiError(429, str(error), code="overloaded", headers=retry_after)
    if isinstance(error, (EngineDead, LifecycleError, WaitTimeout)):
        logger.error("Request %s fails, since the engine does not serve: %s", request_id, error)
        return ApiError(503, f"The engine does not serve: {without_folders(str(error))}", code="engine_unavailable")
    logger.error("Request %s failed", request_id, exc_info=error)
    return ApiError(500, f"The server failed. Its log has the cause under the request id {request_id}.")


def invalid_request(
    error: InvalidRequest, fields: Collection[str] = (), names: Mapping[str, str] | None = None
) -> ApiError:
    """Response to a request that cannot be served.

    fields: names of the request's fields, of which one at the beginning of the text is the `param`.
    names: the client's names of parameters, by the engine's.
    """
    if isinstance(error, EngineAsleep):
        return ApiError(503, str(error), code="engine_asleep")
    if isinstance(error, AdapterNotFound):
        return ApiError(404, str(error), param="model", code="model_not_found")
    # Errors of serialisation have the path from the engine's request on.
    message, param = str(error).removeprefix("sampling_params."), None
    if (match := _PATH.match(message)) is not None:
        path = match[0]
        for own, client in (names or {}).items():
            if path == own or path.startswith((f"{own}.", f"{own}[")):
                message = client + message[len(own) :]
                path = client + path[len(own) :]
                break
        param = path if re.split(r"[.\[]", path, maxsplit=1)[0] in fields else None
    if isinstance(error, ContextTooLong | ChatTemplateError) or message.startswith("The prompt "):
        param = param or next((name for name in ("messages", "prompt", "input") if name in fields), None)
    code = "context_length_exceeded" if isinstance(error, ContextTooLong) else None
    return ApiError(400, message, param=param, code=code)


@contextmanager
def refusals(fields: Collection[str], names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Convert an InvalidRequest of the engine to the response of a request with these fields; see `invalid_request`."""
    try:
        yield
    except InvalidRequest as error:
        raise invalid_request(error, fields, names) from error


def _sendable(text: str) -> str:
    """Escape lone surrogates, which clients may send and JSON cannot have."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def without_folders(text: str) -> str:
    """Text of an error of the engine, with files of this machine by their names alone."""
    return _FILE.sub(lambda match: Path(match[0]).name, text)


def _http_message(error: HTTPException) -> str:
    if error.status_code == 404:
        return "There is no such route. /openapi.json lists the routes."
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow") or (error.headers or {}).get("allow")
        return f"This route does not have the method. Allowed: {allowed}."
    if error.status_code == 400 and error.__cause__ is not None:
        return f"The body cannot be read as JSON: {error.__cause__}."
    return str(error.detail or HTTPStatus(error.status_code).phrase)
