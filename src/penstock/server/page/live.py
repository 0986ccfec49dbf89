"""Route `/live`: the numbers that the page and `penstock top` show, without prompts or texts."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from penstock import __version__
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.messages import BrokerStatus
from penstock.engine.statistics.metric_totals import Observations, RequestTotals
from penstock.server.metrics.front_end_metrics import FrontEndMetrics
from penstock.server.processes.health import Health
from penstock.server.protocol.responses import errors

router = APIRouter()
# Cores record steps for this long after a view has asked; a view that goes on renews it.
_WATCH_S, _RENEWAL_S = 3.0, 1.0
# Age up to which views share the sums over all front ends.
_SHARED_S = 0.2


class LiveRequests(BaseModel):
    """Requests now. unfinished: all. queued: those beyond `max_running`."""

    running: int = 0
    waiting: int = 0
    queued: int = 0
    unfinished: int = 0
    max_running: int = 0


class LiveKvCache(BaseModel):
    """Blocks of all cores. cached: blocks that no request holds, with prefixes that are found again."""

    num_blocks: int = 0
    used: int = 0
    cached: int = 0


class LiveCounters(BaseModel):
    """Counts since the start. computed_tokens: of the current cores' steps."""

    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    computed_tokens: int = 0
    draft_tokens: int
    accepted_tokens: int
    preemptions: int
    finished_requests: int
    refused_requests: int


class LiveSeconds(BaseModel):
    """Sum and number of observed times since the start."""

    sum: float
    count: int


class LiveCores(BaseModel):
    all: int = 0
    recovering: int = 0
    stalled_s: float = 0.0


class LiveStep(BaseModel):
    """A step of a core. ended_at: Unix seconds."""

    core: int
    ended_at: float
    seconds: float
    num_reqs: int
    prefill: int
    decode: int
    draft: int


class Live(BaseModel):
    """State of a server at one moment. time, started_at: Unix seconds. not_ready: reason, or null.

    restarts: processes started again, by kind. steps: those that have ended after the query's `after`, oldest first.
    """

    time: float
    started_at: float | None
    version: str
    model: str
    not_ready: str | None
    requests: LiveRequests
    kv_cache: LiveKvCache
    counters: LiveCounters
    time_to_first_token: LiveSeconds
    inter_token_latency: LiveSeconds
    cores: LiveCores
    restarts: dict[str, int]
    steps: list[LiveStep]


class LiveView:
    """Reads the state of the server for any number of viewers."""

    def __init__(
        self, engine: AsyncEngine, health: Health, metrics: FrontEndMetrics, *, model_name: str, max_num_seqs: int
    ) -> None:
        self._engine = engine
        self._health = health
        self._metrics = metrics
        self._model_name = model_name
        self._max_num_seqs = max_num_seqs
        self._renew_at = 0.0
        self._totals = RequestTotals()
        self._totals_until = 0.0

    def read(self, after: float) -> Live:
        """State now, with the steps that ended after a time in Unix seconds. Keeps the cores recording steps."""
        now = time.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + _RENEWAL_S
            self._engine.watch_steps(_WATCH_S)
        if now >= self._totals_until:
            self._totals, self._totals_until = self._metrics.totals().requests, now + _SHARED_S
        launcher = self._metrics.launcher_totals()
        counters = _counters_of(self._totals)
        live = Live(
            time=time.time(),
            started_at=None if launcher is None else launcher.started_at,
            version=__version__,
            model=self._model_name,
            not_ready=self._health.why_not_ready(),
            requests=LiveRequests(),
            kv_cache=LiveKvCache(),
            counters=counters,
            time_to_first_token=_seconds_of(self._totals.time_to_first_token),
            inter_token_latency=_seconds_of(self._totals.inter_token_latency),
            cores=LiveCores(),
            restarts={} if launcher is None else launcher.num_restarts,
            steps=self._steps(after),
        )
        if self._health.status is not None:
            self._add_status(live, self._health.status)
        return live

    def _add_status(self, live: Live, status: BrokerStatus) -> None:
        stats = status.stats
        live.requests = LiveRequests(
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs,
            queued=status.num_queued_requests,
            unfinished=status.num_requests,
            max_running=status.num_engines * self._max_num_seqs,
        )
        live.kv_cache = LiveKvCache(
            num_blocks=stats.num_blocks, used=stats.num_used_blocks, cached=stats.num_cached_blocks
        )
        live.counters.computed_tokens = stats.num_computed_tokens
        live.cores = LiveCores(all=status.num_engines, recovering=status.num_recovering, stalled_s=status.stalled_s)

    def _steps(self, after: float) -> list[LiveStep]:
        return [
            LiveStep(
                core=core,
                ended_at=step.ended_at,
                seconds=step.seconds,
                num_reqs=step.num_reqs,
                prefill=step.num_prefill_tokens,
                decode=step.num_decode_tokens,
                draft=step.num_draft_tokens,
            )
            for core, step in self._health.recent_steps
            if step.ended_at > after
        ]


@router.get("/live", responses={200: {"model": Live}, **errors(400, 401, 503)})
async def live(
    http: Request, after: Annotated[float, Query(description="Only steps that ended after this Unix time")] = 0.0
) -> Response:
    """Numbers of the server at this moment, for live views that ask once or twice a second; no prompts."""
    view: LiveView = http.app.state.live_view
    return Response(
        view.read(after).model_dump_json(), media_type="application/json", headers={"Cache-Control": "no-store"}
    )


def _counters_of(totals: RequestTotals) -> LiveCounters:
    return LiveCounters(
        prompt_tokens=totals.num_prompt_tokens,
        cached_prompt_tokens=totals.num_cached_tokens,
        generated_tokens=totals.num_generated_tokens,
        draft_tokens=totals.drafts.num_draft_tokens,
        accepted_tokens=totals.drafts.num_accepted_tokens,
        preemptions=totals.num_preemptions,
        finished_requests=sum(totals.num_ended.values()),
        refused_requests=sum(totals.num_refused.values()),
    )


def _seconds_of(observations: Observations) -> LiveSeconds:
    return LiveSeconds(sum=observations.sum, count=sum(observations.counts))
