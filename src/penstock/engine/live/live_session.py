"""Live view of a `Session`."""

from __future__ import annotations

import time
from collections import deque

from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.live.live_server import LiveServer
from penstock.engine.live.live_view import LiveSample, LiveView
from penstock.engine.messages import BrokerStatus
from penstock.engine.statistics.metric_totals import RequestTotals
from penstock.engine.statistics.step_log import StepRecord

# Steps that a live view can show.
_NUM_RECENT_STEPS = 500


class NoLiveSession:
    """Live view of a session without one."""

    def start(self, dispatcher: Dispatcher) -> None: ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...

    def close(self) -> None: ...


class LiveSession(NoLiveSession):
    """Serves the state of a session at a Unix socket. The session calls it around each step, in its thread.

    Raises ConfigError when the path cannot be listened on.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._model_name = config.model.model
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._server = LiveServer(config.live_view.path)
        self._state: _SessionState | None = None

    def start(self, dispatcher: Dispatcher) -> None:
        """Serve the state of the engine behind this dispatcher."""
        self._state = state = _SessionState(dispatcher, self._max_num_seqs)
        self._server.start(LiveView(state, model_name=self._model_name, max_num_seqs=self._max_num_seqs))

    def begin_step(self) -> None:
        """Note the begin of a step. Raises as `CoreClient.watch_steps`."""
        if self._state is not None:
            self._state.begin_step()

    def end_step(self) -> None:
        """Note the end of a step."""
        if self._state is not None:
            self._state.end_step()

    def close(self) -> None:
        """As `LiveServer.close`."""
        self._state = None
        self._server.close()


def live_session(config: EngineConfig) -> NoLiveSession:
    """Live view of a session with this configuration; `start` follows once its engine has started."""
    return NoLiveSession() if config.live_view.live_view is None else LiveSession(config)


class _SessionState:
    """`LiveSource` of a session."""

    def __init__(self, dispatcher: Dispatcher, max_num_seqs: int) -> None:
        self._dispatcher = dispatcher
        self._max_num_seqs = max_num_seqs
        self._started_at = time.time()
        self._watch_s = 0.0
        # Begin of the step under way.
        self._began_at: float | None = None
        self._recent_steps: deque[tuple[int, StepRecord]] = deque(maxlen=_NUM_RECENT_STEPS)

    def begin_step(self) -> None:
        watch_s, self._watch_s = self._watch_s, 0.0
        if watch_s:
            self._dispatcher.core.watch_steps(watch_s)
        self._began_at = time.monotonic()

    def end_step(self) -> None:
        self._began_at = None
        steps = self._dispatcher.core.take_recent_steps()
        self._recent_steps.extend((core, step) for core, own in enumerate(steps) for step in own)

    def watch_steps(self, seconds: float) -> None:
        # The session's thread calls the core.
        self._watch_s = seconds

    def request_totals(self) -> RequestTotals:
        return self._dispatcher.totals()

    def status(self) -> BrokerStatus:
        status, began_at = self._dispatcher.core.status(), self._began_at
        step_s = 0.0 if began_at is None else time.monotonic() - began_at
        num_queued = status.num_requests - status.num_engines * self._max_num_seqs
        return replace(status, stalled_s=max(status.stalled_s, step_s), num_queued_requests=max(0, num_queued))

    def recent_steps(self) -> list[tuple[int, StepRecord]]:
        return list(self._recent_steps)

    def why_not_ready(self) -> str | None:
        return self._dispatcher.core.status().why_not_ready

    def started_at(self) -> float:
        return self._started_at

    def history(self) -> list[LiveSample]:
        return []

    def num_restarts(self) -> dict[str, int]:
        status = self._dispatcher.core.status()
        return {"core": status.num_restarts, "workers": status.num_worker_restarts}
