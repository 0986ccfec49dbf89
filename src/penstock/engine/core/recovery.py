"""Recovery from worker failures: restart the workers and preempt the running requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

import msgspec

from penstock.engine.core.restarts import FailureCount, Quarantine, restart_backoff_s
from penstock.engine.core.startup import StartedEngine
from penstock.errors import KILLED, EngineDead, NeedsNewProcess, WaitTimeout, WorkerError
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Recovery:
    """Replaces failed workers, until they fail more than `max_restarts` times in a row.

    Running requests are preempted and continue from their tokens. A request that makes workers fail repeatedly is
    identified by the `Quarantine` and ended with an error.

    tell_ends: called with the last outputs of requests that end so.
    has_failures: whether there were failures that no results have cleared; otherwise results need not be noted.
    is_recovering: whether workers are being replaced, which takes as long as starting them. num_restarts: replacements
        of the workers so far.
    """

    def __init__(
        self, scheduler: Scheduler, max_restarts: int, tell_ends: Callable[[list[EngineCoreOutput]], None]
    ) -> None:
        self.has_failures = False
        self.is_recovering = False
        self.num_restarts = 0
        self._tell_ends = tell_ends
        self._scheduler = scheduler
        self._max_restarts = max_restarts
        self._quarantine = Quarantine(scheduler)
        self._failures = FailureCount()
        self._failures.note_start()

    def note_request(self) -> None:
        """Note that a request is about to be added."""
        if not self._scheduler.has_unfinished_requests():
            self._failures.note_idle()

    def note_results(self, req_ids: Collection[str]) -> None:
        """Note that workers returned results of these requests."""
        self._failures.note_result()
        self._quarantine.note_results(req_ids)
        self.has_failures = self._quarantine.has_suspicions

    def note_ends(self, req_ids: Collection[str]) -> None:
        """Note that these requests ended without a result, which ends their trials."""
        self._quarantine.note_results(req_ids)

    def note_failure(self, error: Exception) -> None:
        """Count a failure of workers; an interrupted turn does not count, since its caller got the exception."""
        if not self._scheduler.has_unfinished_requests():
            self._failures.note_idle()
        self._failures.note(error)
        self.has_failures = True

    def replace_workers(self, engine: StartedEngine, error: Exception, req_ids: Collection[str]) -> None:
        """Start new workers, with exponential backoff after consecutive failures.

        error: cause. req_ids: requests of the steps in flight. Raises EngineDead when restarts are exhausted.
        """
        self.has_failures = self.is_recovering = True
        why_not = engine.executor.why_not_restart()
        if why_not is not None:
            raise NeedsNewProcess(f"{error}. {why_not}") from error
        self._scheduler.reset_for_recovery()
        is_from_outside = isinstance(error, WaitTimeout) or getattr(error, "cause_type", None) == KILLED
        culprit = self._quarantine.note_failure(req_ids, is_from_outside=is_from_outside)
        if culprit is not None:
            self._end(culprit, error)
        # The trial of a suspect takes one failure more when it may have an external cause.
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
                self.num_restarts += 1
                self.is_recovering = False
                return

    def _prepare_restart(self, error: Exception, limit: int) -> None:
        """Sleep for the backoff; raise EngineDead after more than `limit` consecutive failures."""
        num_failures = self._failures.number
        if num_failures > limit:
            first = f"; the first time: {self._failures.first}" if num_failures > 1 else ""
            raise EngineDead(f"Workers failed {num_failures} times in a row{first}; the last time: {error}") from error
        why = str(error).rstrip(".")
        logger.warning("%s. Restarting the workers (failed %d of %d times)", why, num_failures, limit)
        time.sleep(restart_backoff_s(num_failures))

    def _end(self, culprit: str, error: Exception) -> None:
        """End the request that makes workers fail."""
        why = f"Workers failed again and again while they ran this request, the last time by itself: {error}"
        ended = self._scheduler.finish_requests([culprit], FinishReason.ERROR)
        logger.error("Request %s ends. %s", culprit, why)
        self._tell_ends([msgspec.structs.replace(output, error=why) for output in ended])
