"""Liveness and readiness of the server: whether it makes progress, and whether it admits new requests."""

from __future__ import annotations

from typing import Any, TypeAlias

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engine.messages import BrokerStatus
from penstock.engine.processes.broker_connection import BrokerState
from penstock.engine.statistics.step_log import StepRecord
from penstock.server.http.errors import ApiError
from penstock.server.http.guards import is_public

_NOT_NOW: dict[int | str, dict[str, Any]] = {503: {"description": "No; the body has the reason."}}
router = APIRouter(responses=_NOT_NOW)
_RETRY_AFTER_S = 2
_State: TypeAlias = "dict[str, str | int | float]"


class Health:
    """Judgement of the server's state by the heartbeats of its broker.

    step_limit_s: longest time in which a healthy core with work computes no token; it exceeds the longest step.
    silence_limit_s: longest time without a heartbeat of a healthy broker, with that until the launcher replaces it; it
    begins anew with a replacement. is_draining: whether the server is about to end.
    """

    def __init__(self, broker: BrokerState, step_limit_s: float, silence_limit_s: float) -> None:
        self._broker = broker
        self._step_limit_s = step_limit_s
        self._silence_limit_s = silence_limit_s
        self.is_draining = False

    @property
    def status(self) -> BrokerStatus | None:
        """Last heartbeat of the broker."""
        return self._broker.status

    @property
    def recent_steps(self) -> list[tuple[int, StepRecord]]:
        """Last steps, each with its core's number, oldest first; only those while a live view watched."""
        return list(self._broker.recent_steps)

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat of the broker."""
        return self._broker.silent_s

    def why_dead(self) -> str | None:
        """Why an orchestrator should replace the server; None while it works or repairs itself."""
        if self._broker.idle_s > self._silence_limit_s:
            return f"the broker has sent no heartbeat for {self._broker.silent_s:.0f} s"
        status = self._broker.status
        if status is not None and status.stalled_s > self._step_limit_s:
            return f"a core with unfinished requests has computed no token for {status.stalled_s:.0f} s"
        return None

    def why_not_ready(self) -> str | None:
        """Why new requests should go elsewhere for now."""
        status = self._broker.status
        if self.is_draining:
            return "the server is shutting down"
        if (dead := self.why_dead()) is not None:
            return dead
        if status is None or self._broker.silent_s > _STALE_S:
            return "the broker is being started"
        return status.why_not_ready


class Drainage:
    """Middleware that refuses new requests, other than probes, while the server shuts down."""

    def __init__(self, app: ASGIApp, *, health: Health) -> None:
        self._app = app
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._health.is_draining or is_public(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            503,
            "The server is shutting down. Send the request to another one.",
            code="shutting_down",
            headers={"Retry-After": str(_RETRY_AFTER_S), "Connection": "close"},
        )
        await error.response(scope)(scope, receive, send)


# Silence of the broker, in seconds, after which it may be gone.
_STALE_S = 2.0


@router.head("/health", include_in_schema=False)
@router.get("/health", summary="Liveness: 503 when the server makes no progress and does not repair itself")
async def health(http: Request) -> Response:
    return _response(_health_of(http).why_dead(), "alive", {})


@router.post("/ping", summary="Liveness, as SageMaker asks for it")
@router.get("/ping", summary="Liveness, as SageMaker asks for it")
async def ping(http: Request) -> Response:
    return await health(http)


@router.get("/load", summary="Number of requests that run or wait")
async def load(http: Request) -> Response:
    status = _health_of(http).status
    return JSONResponse({"server_load": 0 if status is None else status.num_requests})


@router.head("/ready", include_in_schema=False)
@router.get("/ready", summary="Readiness: 503 with Retry-After while no new requests are admitted")
async def ready(http: Request) -> Response:
    state = _health_of(http)
    status = state.status
    numbers: _State = {}
    if status is not None:
        numbers = {
            "state": status.stats.state.name,
            "num_requests": status.num_requests,
            "num_queued_requests": status.num_queued_requests,
        }
    return _response(state.why_not_ready(), "ready", numbers)


def _health_of(http: Request) -> Health:
    health: Health = http.app.state.health
    return health


def _response(why_not: str | None, good: str, numbers: _State) -> Response:
    if why_not is None:
        return JSONResponse({"status": good, **numbers})
    return JSONResponse(
        {"status": f"not {good}", "reason": why_not, **numbers},
        status_code=503,
        headers={"Retry-After": str(_RETRY_AFTER_S)},
    )
