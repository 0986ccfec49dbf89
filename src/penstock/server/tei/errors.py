"""Errors of TEI's API: its statuses, and its shape."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from starlette.responses import Response

from penstock.errors import PenstockError
from penstock.server.http.body import BodyRoute
from penstock.server.http.context import request_id_of
from penstock.server.http.errors import ApiError, api_error, tei_error
from penstock.server.routes.common import served_model

# TEI's statuses of what the other APIs answer with 400 and 500.
_STATUSES = {400: 413, 500: 424}
# Task of the model that a route needs.
_TASKS = {"/embed": "embed", "/embed_all": "token_embed", "/similarity": "embed", "/predict": "classify"}


class TeiRoute(BodyRoute):
    """Route whose errors are TEI's, but for `/info` and for `/rerank`, which takes requests of another API too.

    A body with a wrong field gets 400, as of the other APIs.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        task = _TASKS.get(self.path)
        if task is None:
            return handle

        async def handle_as_tei(request: Request) -> Response:
            with tei_errors(request, has_task=task in served_model(request).tasks):
                return await handle(request)

        return handle_as_tei


@contextmanager
def tei_errors(http: Request, *, has_task: bool = True) -> Iterator[None]:
    """Give errors TEI's statuses and shape. has_task: whether the model can do what the route is for."""
    try:
        yield
    except (ApiError, PenstockError) as error:
        own = api_error(error, request_id_of(http.scope))
        status = _STATUSES.get(own.status_code, own.status_code) if has_task else 424
        raise ApiError(
            status, own.message, param=own.param, code=own.code, headers=own.headers, shape=tei_error
        ) from error
