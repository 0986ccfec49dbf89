"""Queues: waiting and running requests."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable

from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.request import Request, RequestStatus
from penstock.scheduler.results import make_output

logger = logging.getLogger(__name__)
# Requests that sort first run first; the last ones are preempted first.
_ServiceOrder = Callable[[Request], tuple[float, ...]]
_ORDERS: dict[str, _ServiceOrder] = {
    "fcfs": lambda request: (request.order,),
    "priority": lambda request: (request.priority, request.arrival_time, request.order),
}


class WaitingQueue:
    """Waiting requests in the order of a `SchedulerConfig.policy`, at most one per req_id.

    Requests that are not ready are skipped, and keep their place in the order.

    num_changes: requests that came or left, so far.
    """

    def __init__(self, policy: str) -> None:
        self._order = _ORDERS[policy]
        self._ready: list[Request] = []
        self._not_ready: set[Request] = set()
        self.num_changes = 0

    def __len__(self) -> int:
        """Number of waiting requests, ready or not."""
        return len(self._ready) + len(self._not_ready)

    def add(self, request: Request) -> None:
        """Add a new or preempted request."""
        self.num_changes += 1
        if request.waits_for:
            self._not_ready.add(request)
        else:
            bisect.insort(self._ready, request, key=self._order)

    def with_reason(self, reason: str) -> list[Request]:
        """Requests that wait for this reason, in any order."""
        return [request for request in self._not_ready if reason in request.waits_for]

    def peek(self) -> Request | None:
        """Return the first ready request, which stays; None without one."""
        return self._ready[0] if self._ready else None

    def first(self, most: int) -> list[Request]:
        """The first ready requests."""
        return self._ready[:most]

    def remove(self, request: Request) -> None:
        """Remove a waiting request."""
        self.num_changes += 1
        if request in self._not_ready:
            self._not_ready.remove(request)
            return
        index = bisect.bisect_left(self._ready, self._order(request), key=self._order)
        assert self._ready[index] is request
        del self._ready[index]

    def admit(self, running: list[Request]) -> None:
        """Move the first ready request into `running`, which is in the same order."""
        self.num_changes += 1
        bisect.insort(running, self._ready[0], key=self._order)
        del self._ready[0]


class RequestLists:
    """All unfinished requests. Running ones hold blocks; waiting ones may have reserved blocks.

    running: in service order; preempted from the end.
    finished_req_ids: ended requests that the worker still holds; the next step names them.
    before_end: called with each request that is about to end, but for those that are broken off. on_end: called with
        each request that has ended.
    """

    def __init__(
        self,
        policy: str,
        kv_cache: KVCacheManager,
        before_end: Callable[[Request], None],
        on_end: Callable[[Request], None],
    ) -> None:
        self.by_id: dict[str, Request] = {}
        self.waiting = WaitingQueue(policy)
        self.running: list[Request] = []
        self.finished_req_ids: set[str] = set()
        self.num_preemptions = 0
        self._kv_cache = kv_cache
        self._before_end = before_end
        self._on_end = on_end
        self._num_added = 0

    @property
    def version(self) -> tuple[int, int]:
        """Version of the lists: equal at two times only if no request came, ended or was preempted in between.

        Requests join `running` only from `waiting`, which counts that.
        """
        return self.waiting.num_changes, len(self.running)

    def add(self, request: Request) -> None:
        """Add a new waiting request."""
        request.order = self._num_added
        self._num_added += 1
        self.waiting.add(request)
        self.by_id[request.req_id] = request

    def wait_for(self, req_id: str, reason: str, *, is_there: bool) -> None:
        """Add (or remove) a reason why a request waits. Ignores unknown ids and reasons."""
        request = self.by_id.get(req_id)
        if request is None:
            return
        is_waiting = request.status is not RequestStatus.RUNNING
        if is_waiting:
            self.waiting.remove(request)
        if is_there:
            request.waits_for.discard(reason)
        else:
            request.waits_for.add(reason)
        if is_waiting:
            self.waiting.add(request)

    def preempt(self, request: Request) -> None:
        """Preempt a running request and free its blocks."""
        self.running.remove(request)
        self._kv_cache.free(request)
        request.spec_token_ids = []
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request)

    def waiting_holders(self) -> list[Request]:
        """Return waiting requests with reserved blocks, newest first."""
        return [
            request
            for request in reversed(self.by_id.values())
            if request.status is not RequestStatus.RUNNING and self._kv_cache.holds(request)
        ]

    def finish(self, request: Request) -> None:
        """End a request, waiting or running; idempotent."""
        if request.status is RequestStatus.FINISHED:
            return
        self._before_end(request)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._kv_cache.free(request)
            self.finished_req_ids.add(request.req_id)
        else:
            self.waiting.remove(request)
            if self._kv_cache.holds(request):
                self._kv_cache.free(request)
        request.status = RequestStatus.FINISHED
        del self.by_id[request.req_id]
        self._on_end(request)

    def break_off(self, request: Request, error: Exception) -> EngineCoreOutput:
        """End a request after an exception in the scheduler and return its last output; other requests go on."""
        logger.error("Request %s ends, since the scheduler failed for it", request.req_id, exc_info=error)
        if request.status is not RequestStatus.FINISHED:
            self._remove(request)
        why = f"The scheduler failed for this request with {type(error).__name__}: {error}"
        return make_output(request, [], FinishReason.ERROR, error=why)

    def _remove(self, request: Request) -> None:
        """End a request in the middle of its admission or results, when its status may not say where it is."""
        self._kv_cache.take_back(request)
        (self.running if request in self.running else self.waiting).remove(request)
        if request.status is RequestStatus.RUNNING:
            self.finished_req_ids.add(request.req_id)
        request.status = RequestStatus.FINISHED
        self.by_id.pop(request.req_id, None)
        self._on_end(request)
