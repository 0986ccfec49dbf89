"""Routes that pause the engine, let it sleep and wake it; they exist with `enable_admin` only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from penstock.errors import EngineAsleep, InvalidRequest, OutOfMemory
from penstock.server.http.body import BodyRoute
from penstock.server.http.errors import ApiError, invalid_request, json_response
from penstock.server.protocol.responses import IsPaused, IsSleeping, PauseStatus, errors
from penstock.server.routes.common import served_model

router = APIRouter(route_class=BodyRoute)
_FIELDS = ("level", "mode", "tags")
Mode = Literal["abort", "wait", "keep"]
Tags = Annotated[list[Literal["weights", "kv_cache"]] | None, Query()]


@router.post("/sleep", responses={200: {"description": "It sleeps."}, **errors(400, 401, 409, 500, 503, 507)})
async def sleep(http: Request, level: int = 1, mode: Mode = "abort", tags: Tags = None) -> Response:
    """Give the memory of weights and KV cache back. Answers once requests have ended as `mode` says."""
    with _refusals():
        await served_model(http).engine.sleep(level, mode, tags)
    return Response()


@router.post("/wake_up", responses={200: {"description": "It is awake."}, **errors(400, 401, 500, 503, 507)})
async def wake_up(http: Request, tags: Tags = None) -> Response:
    """Let memory come again; of these tags, or all."""
    with _refusals():
        await served_model(http).engine.wake_up(tags)
    return Response()


@router.get("/is_sleeping", responses={200: {"model": IsSleeping}, **errors(401, 500, 503)})
async def is_sleeping(http: Request) -> Response:
    """Whether memory is given back."""
    return json_response({"is_sleeping": await served_model(http).engine.is_sleeping()})


@router.post("/pause", responses={200: {"model": PauseStatus}, **errors(400, 401, 500, 503)})
async def pause(
    http: Request, mode: Mode = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
) -> Response:
    """Run no steps until `/resume`. Answers once requests have ended as `mode` says."""
    with _refusals():
        await served_model(http).engine.pause_generation(
            mode, wait_for_inflight_requests=wait_for_inflight_requests, clear_cache=clear_cache
        )
    return json_response({"status": "paused"})


@router.post("/resume", responses={200: {"model": PauseStatus}, **errors(401, 500, 503)})
async def resume(http: Request) -> Response:
    """End a pause."""
    await served_model(http).engine.resume_generation()
    return json_response({"status": "resumed"})


@router.get("/is_paused", responses={200: {"model": IsPaused}, **errors(401, 500, 503)})
async def is_paused(http: Request) -> Response:
    """Whether the engine runs no steps, because of a pause or a sleep."""
    return json_response({"is_paused": await served_model(http).engine.is_paused()})


@contextmanager
def _refusals() -> Iterator[None]:
    """Answer 409 for what the state does not allow, and 507 without memory or space on a disk."""
    try:
        yield
    except EngineAsleep as error:
        raise ApiError(409, str(error), code="engine_asleep") from error
    except InvalidRequest as error:
        raise invalid_request(error, _FIELDS) from error
    except OutOfMemory as error:
        raise ApiError(507, str(error), code="out_of_memory") from error
