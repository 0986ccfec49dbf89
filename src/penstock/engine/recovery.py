"""What becomes of an engine whose workers fail: they are replaced, for as long as that helps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

import msgspec

from penstock.engine.quarantine import Quarantine
from penstock.engine.restarts import FailuresInARow, pause_before_restart
from penstock.engine.startup import StartedEngine
from penstock.errors import KILLED, EngineDead, NeedsNewProcess, WaitTimeout, WorkerError
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Recovery:
    """Replaces an engine's workers, which have just started, until they fail more than `max_restarts` times in a row.

    What was running is preempted, and goes on from its tokens. A request that makes workers fail again and again is
    found out (`Quarantine`), and ends.

    tell_ends: gets the last outputs of requests that end so.
    is_going_on: whether workers are being replaced, which takes as long as starting them.
    """

    def __init__(
        self, scheduler: Scheduler, max_restarts: int, tell_ends: Callable[[list[EngineCoreOutput]], None]
    ) -> None:
        self.is_going_on = False
        self._tell_ends = tell_ends
        self._scheduler = scheduler
        self._max_restarts = max_restarts
        self._quarantine = Quarantine(scheduler)
        self._failures = FailuresInARow()
        self._failures.note_start()

    def note_request(self) -> None:
        """One is about to be added."""
        if not self._scheduler.has_unfinished_requests():
            self._failures.note_idle()

    def note_results(self, req_ids: Collection[str]) -> None:
        """Workers have brought results of these requests."""
        self._failures.note_result()
        self._quarantine.note_results(req_ids)

    def note_ends(self, req_ids: Collection[str]) -> None:
        """These requests have ended without a result, so that nobody need wait for their trial."""
        self._quarantine.note_results(req_ids)

    def note_failure(self, error: Exception) -> None:
        """Of workers; not of what else a turn was broken off by, which whoever broke it off knows of."""
        if not self._scheduler.has_unfinished_requests():
            self._failures.note_idle()
        self._failures.note(error)

    def replace_workers(self, engine: StartedEngine, error: Exception, req_ids: Collection[str]) -> None:
        """Start new ones, after a while where there were failures in a row.

        error: why. req_ids: of the steps that were under way. Raises EngineDead where it is of no use.
        """
        self.is_going_on = True
        why_not = engine.executor.why_not_restart()
        if why_not is not None:
            raise NeedsNewProcess(f"{error}. {why_not}") from error
        self._scheduler.reset_for_recovery()
        is_from_outside = isinstance(error, WaitTimeout) or getattr(error, "cause_type", None) == KILLED
        culprit = self._quarantine.note_failure(req_ids, is_from_outside=is_from_outside)
        if culprit is not None:
            self._end(culprit, error)
        # A trial takes one failure more where others may have brought it about.
        limit = self._max_restarts + (culprit is not None and is_from_outside)
        while True:
            self._prepare_restart(error, limit)
            try:
                engine.restart_workers()
            except Exception as cause:
                error = WorkerError(
                    f"The workers could not be replaced: {cause}",
                    method="restart",
                    rank=0,
                    cause_type=type(cause).__name__,
                )
                error.__cause__ = cause
                self.note_failure(error)
            else:
                self._failures.note_start()
                self.is_going_on = False
                return

    def _prepare_restart(self, error: Exception, limit: int) -> None:
        """Wait for a while after failures in a row; after more than this limit, give up."""
        num_failures = self._failures.number
        if num_failures > limit:
            first = f"; the first time: {self._failures.first}" if num_failures > 1 else ""
            raise EngineDead(f"Workers failed {num_failures} times in a row{first}; the last time: {error}") from error
        why = str(error).rstrip(".")
        logger.warning("%s. Restarting the workers (failed %d of %d times)", why, num_failures, limit)
        time.sleep(pause_before_restart(num_failures))

    def _end(self, culprit: str, error: Exception) -> None:
        """End the request that makes workers fail."""
        why = f"Workers failed again and again while they ran this request, the last time by itself: {error}"
        ended = self._scheduler.finish_requests([culprit], FinishReason.ERROR)
        logger.error("Request %s ends. %s", culprit, why)
        self._tell_ends([msgspec.structs.replace(output, error=why) for output in ended])
