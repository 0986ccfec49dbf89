"""Route `/live`: the live view of a server, for its page and `penstock top`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.live.live_view import Live, LiveSample, LiveView
from penstock.engine.messages import BrokerStatus
from penstock.engine.statistics.metric_totals import RequestTotals
from penstock.engine.statistics.step_log import StepRecord
from penstock.server.metrics.front_end_metrics import FrontEndMetrics
from penstock.server.processes.health import Health
from penstock.server.protocol.responses import errors

router = APIRouter()


class ServerState:
    """`LiveSource` of a server, as any of its front ends has it."""

    def __init__(self, engine: AsyncEngine, health: Health, metrics: FrontEndMetrics) -> None:
        self._health = health
        self._metrics = metrics
        self.watch_steps = engine.watch_steps
        self.why_not_ready = health.why_not_ready

    def request_totals(self) -> RequestTotals:
        return self._metrics.totals().requests

    def status(self) -> BrokerStatus | None:
        return self._health.status

    def recent_steps(self) -> list[tuple[int, StepRecord]]:
        return self._health.recent_steps

    def started_at(self) -> float | None:
        launcher = self._metrics.launcher_totals()
        return None if launcher is None else launcher.started_at

    def num_restarts(self) -> dict[str, int]:
        launcher = self._metrics.launcher_totals()
        return {} if launcher is None else launcher.num_restarts

    def history(self) -> list[LiveSample]:
        return self._metrics.history()


@router.get("/live", responses={200: {"model": Live}, **errors(400, 401, 503)})
async def live(
    http: Request,
    after: Annotated[float, Query(description="Only steps that ended after this Unix time")] = 0.0,
    history: Annotated[bool, Query(description="Also samples of the last two minutes")] = False,
) -> Response:
    """Numbers of the server at this moment, for live views that ask once or twice a second; no prompts."""
    view: LiveView = http.app.state.live_view
    return Response(
        msgspec.json.encode(view.read(after, with_history=history)),
        media_type="application/json",
        headers={"Cache-Control": "no-store"},
    )
