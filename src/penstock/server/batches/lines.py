"""Lines of OpenAI's batch format: requests and their answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from penstock.config.checks import did_you_mean
from penstock.errors import InvalidParameter, InvalidRequest

# Prefix of an answer's id, and fields of a request's line.
BATCH_ID_PREFIX = "batch_req_"
BATCH_FIELDS = ("custom_id", "method", "url", "body")


class LineChecks:
    """Checks of the lines of one file. urls: endpoints that its requests may have."""

    def __init__(self, urls: Collection[str]) -> None:
        self._urls = urls
        self._where_of: dict[str, str] = {}

    def check(self, where: str, fields: dict[str, Any]) -> None:
        """Check a request's fields, but for its body. where: place of the line. Raises InvalidRequest."""
        for key, value in fields.items():
            if key not in BATCH_FIELDS:
                raise _unknown_field(key, value, BATCH_FIELDS)
        name = fields.get("custom_id")
        if not isinstance(name, str):
            raise InvalidRequest(f"custom_id={name!r} is not valid. Allowed: text, which the answer is found by.")
        first = self._where_of.setdefault(name, where)
        if first != where:
            raise InvalidRequest(f"custom_id={name!r} is that of {first} too. Give each request one of its own.")
        method, url = fields.get("method", "POST"), fields.get("url")
        if method != "POST":
            raise InvalidRequest(f"method={method!r} is not valid. Allowed: 'POST'.")
        if not isinstance(url, str) or url not in self._urls:
            raise InvalidRequest(f"url={url!r} is not valid. Allowed: {', '.join(self._urls)}.")
        if not isinstance(fields.get("body"), dict):
            raise InvalidRequest(f"body={fields.get('body')!r} is not valid. Allowed: an object with the request.")


def answer_line(id: str, custom_id: Any, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Line that answers a request. id: of the line, without its prefix. body: of the response with this status."""
    error = None
    if status != 200:
        error = {"code": body["error"]["type"], "message": body["error"]["message"]}
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": f"{BATCH_ID_PREFIX}{id}", "custom_id": custom_id, "response": response, "error": error}


def expired_line(id: str, custom_id: Any, window: str) -> dict[str, Any]:
    """Line of a request that was not answered within the batch's window, such as "24h"."""
    error = {"code": "batch_expired", "message": f"The batch expired after {window}, before this request was answered."}
    return {"id": f"{BATCH_ID_PREFIX}{id}", "custom_id": custom_id, "response": None, "error": error}


def _unknown_field(name: str, value: Any, allowed: Sequence[str]) -> InvalidParameter:
    advice = did_you_mean(name, allowed, most=1) or f" Allowed: {', '.join(allowed)}."
    return InvalidParameter(f"There is no field {name} (given: {value!r}).{advice}")
