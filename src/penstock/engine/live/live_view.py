"""Live view: the numbers that the server's page and `penstock top` show, without prompts or texts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from penstock.contract.feature import figures_of_features
from penstock.engine.messages import BrokerStatus
from penstock.engine.statistics.metric_totals import Observations, RequestTotals
from penstock.engine.statistics.step_log import StepRecord
from penstock.scheduler.outputs import SchedulerStats
from penstock.version import __version__

# Cores record steps for this long after a view has asked; a view that goes on renews it.
_WATCH_S, _RENEWAL_S = 3.0, 1.0
# Age up to which views share the sums over all front ends.
_SHARED_S = 0.2


@dataclass(slots=True)
class LiveRequests:
    """Requests now. unfinished: all. queued: those beyond `max_running`."""

    running: int = 0
    waiting: int = 0
    queued: int = 0
    unfinished: int = 0
    max_running: int = 0


@dataclass(slots=True)
class LiveKvCache:
    """KV cache of all cores.

    num_blocks: blocks of token positions. used: those that requests hold. cached: others, with prefixes that are found
    again. num_states, used_states: of recurrent layers. snapshots: states that are found again.
    """

    num_blocks: int = 0
    used: int = 0
    cached: int = 0
    num_states: int = 0
    used_states: int = 0
    snapshots: int = 0

    @property
    def usage(self) -> float:
        """Share that requests hold, 0 to 1: of blocks or of states, whichever is larger."""
        return max(self.used / max(1, self.num_blocks), self.used_states / max(1, self.num_states))


@dataclass(slots=True)
class LiveEncoderCache:
    """Features of images, sounds and videos in the encoder caches of all cores.

    num_tokens: tokens of items that have room; 0 for a model of text. used: those of items that running requests use.
    cached: of others, which are found again. queries: items that requests needed, of the current cores. hits: those
    that were found.
    """

    num_tokens: int = 0
    used: int = 0
    cached: int = 0
    queries: int = 0
    hits: int = 0


@dataclass(slots=True, kw_only=True)
class LiveCounters:
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


@dataclass(slots=True)
class LiveSeconds:
    """Sum and number of observed times since the start."""

    sum: float
    count: int


@dataclass(slots=True)
class LiveCores:
    """Cores now. recovering: cores that are being replaced, or whose workers are.

    stalled_s: longest time since a core with unfinished requests has computed a token. state: "running", or the state
    of cores that rest, such as "sleeping (idle, level 1: weights, kv_cache)".
    """

    all: int = 0
    recovering: int = 0
    stalled_s: float = 0.0
    state: str = "running"


@dataclass(slots=True)
class LiveStep:
    """A step of a core. ended_at: Unix seconds."""

    core: int
    ended_at: float
    seconds: float
    num_reqs: int
    prefill: int
    decode: int
    draft: int


@dataclass(slots=True)
class LiveFigure:
    """Figure of a feature. value: since the cores' start for a counter, else now. of: value of which it is a share;
    null for none. unit: "bytes", or "" for a number.
    """

    label: str
    value: float
    of: float | None = None
    unit: str = ""


@dataclass(slots=True, kw_only=True)
class LiveSample:
    """Load and counts of an engine or a server at one moment. time: Unix seconds. figures: of its features."""

    time: float
    requests: LiveRequests = field(default_factory=LiveRequests)
    kv_cache: LiveKvCache = field(default_factory=LiveKvCache)
    encoder_cache: LiveEncoderCache = field(default_factory=LiveEncoderCache)
    figures: list[LiveFigure] = field(default_factory=list)
    counters: LiveCounters
    time_to_first_token: LiveSeconds
    inter_token_latency: LiveSeconds


@dataclass(slots=True, kw_only=True)
class Live(LiveSample):
    """State of an engine or a server at one moment. started_at: Unix seconds. not_ready: reason, or null.

    restarts: processes started again, by kind. steps: those that have ended after the query's `after`, oldest first.
    history: samples of the last two minutes, one per second, if the query asks; only a server keeps any.
    """

    started_at: float | None
    version: str
    model: str
    not_ready: str | None
    cores: LiveCores = field(default_factory=LiveCores)
    restarts: dict[str, int]
    steps: list[LiveStep]
    history: list[LiveSample] = field(default_factory=list)


class LiveSource(Protocol):
    """Engine or server that a live view reads, in any thread and without a wait for a step."""

    def watch_steps(self, seconds: float) -> None:
        """Record the steps of the next seconds."""

    def request_totals(self) -> RequestTotals:
        """Counters and histograms of the requests so far."""

    def status(self) -> BrokerStatus | None:
        """State of the cores; None before it is known."""

    def recent_steps(self) -> list[tuple[int, StepRecord]]:
        """Last recorded steps, each with its core's number, oldest first."""

    def why_not_ready(self) -> str | None:
        """Why no new requests are admitted."""

    def started_at(self) -> float | None:
        """Time of the start in Unix seconds."""

    def num_restarts(self) -> dict[str, int]:
        """Processes started again, by kind."""

    def history(self) -> list[LiveSample]:
        """Samples of the last two minutes, oldest first."""


class LiveView:
    """Reads the state of a source for any number of viewers. max_num_seqs: of each core."""

    def __init__(self, source: LiveSource, *, model_name: str, max_num_seqs: int) -> None:
        self._source = source
        self._model_name = model_name
        self._max_num_seqs = max_num_seqs
        self._renew_at = 0.0
        self._totals = RequestTotals()
        self._totals_until = 0.0

    def read(self, after: float, *, with_history: bool = False) -> Live:
        """State now, with the steps that ended after a time in Unix seconds. Keeps the cores recording steps."""
        source, now = self._source, time.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + _RENEWAL_S
            source.watch_steps(_WATCH_S)
        if now >= self._totals_until:
            self._totals, self._totals_until = source.request_totals(), now + _SHARED_S
        status = source.status()
        sample = sample_of(self._totals, status, self._max_num_seqs)
        return Live(
            **{name: getattr(sample, name) for name in LiveSample.__slots__},
            started_at=source.started_at(),
            version=__version__,
            model=self._model_name,
            not_ready=source.why_not_ready(),
            cores=LiveCores() if status is None else _cores_of(status),
            restarts=source.num_restarts(),
            steps=[_step_of(core, step) for core, step in source.recent_steps() if step.ended_at > after],
            history=source.history() if with_history else [],
        )


def sample_of(totals: RequestTotals, status: BrokerStatus | None, max_num_seqs: int) -> LiveSample:
    """Sample of this moment. status: None before the cores are known. max_num_seqs: of each core."""
    sample = LiveSample(
        time=time.time(),
        counters=_counters_of(totals),
        time_to_first_token=_seconds_of(totals.time_to_first_token),
        inter_token_latency=_seconds_of(totals.inter_token_latency),
    )
    if status is not None:
        stats = status.stats
        sample.requests = LiveRequests(
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs,
            queued=status.num_queued_requests,
            unfinished=status.num_requests,
            max_running=status.num_engines * max_num_seqs,
        )
        sample.kv_cache = LiveKvCache(
            num_blocks=stats.num_blocks,
            used=stats.num_used_blocks,
            cached=stats.num_cached_blocks,
            num_states=stats.num_states,
            used_states=stats.num_used_states,
            snapshots=stats.num_snapshots,
        )
        sample.encoder_cache = LiveEncoderCache(
            num_tokens=stats.num_encoder_tokens,
            used=stats.num_used_encoder_tokens,
            cached=stats.num_cached_encoder_tokens,
            queries=stats.num_encoder_queries,
            hits=stats.num_encoder_hits,
        )
        sample.figures = _figures_of(stats)
        sample.counters.computed_tokens = stats.num_computed_tokens
    return sample


def _figures_of(stats: SchedulerStats) -> list[LiveFigure]:
    """Figures that are not 0, and shares of what is not 0: others are of what is not in use."""
    values: dict[str, float] = {**stats.counters, **stats.gauges}
    return [
        LiveFigure(one.label, values[one.name], values[one.of] if one.of else None, one.unit)
        for one in (figures_of_features() if values else ())
        if values.get(one.of or one.name)
    ]


def _cores_of(status: BrokerStatus) -> LiveCores:
    recovering = status.num_recovering + status.num_recovering_workers
    state = status.stats.state.name
    return LiveCores(all=status.num_engines, recovering=recovering, stalled_s=status.stalled_s, state=state)


def _step_of(core: int, step: StepRecord) -> LiveStep:
    return LiveStep(
        core=core,
        ended_at=step.ended_at,
        seconds=step.seconds,
        num_reqs=step.num_reqs,
        prefill=step.num_prefill_tokens,
        decode=step.num_decode_tokens,
        draft=step.num_draft_tokens,
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
