"""Where each request is: it waits, or it runs, until it ends."""

from __future__ import annotations

import logging

from penstock.scheduler.decode_steps import DecodeSteps
from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.scheduler.queues import WaitingQueue
from penstock.scheduler.request import Request, RequestStatus
from penstock.scheduler.results import make_output

logger = logging.getLogger(__name__)


class RequestLists:
    """All requests that have not ended. Those that run hold blocks, and those that wait may have reserved some.

    running: served in this order, preempted from its end.
    finished_req_ids: requests that the worker holds although they no longer run, which the next step tells it.
    decodes: of the last steps, those that can only be repeated, each of other requests and in the order in which their
        turns come; whatever moves a request ends them all.
    """

    def __init__(self, policy: str, kv_cache: KVCacheManager) -> None:
        self.by_id: dict[str, Request] = {}
        self.waiting = WaitingQueue(policy)
        self.running: list[Request] = []
        self.finished_req_ids: set[str] = set()
        self.decodes: list[DecodeSteps] = []
        self.num_preemptions = 0
        self._kv_cache = kv_cache
        self._num_added = 0

    def next_decodes(self) -> DecodeSteps | None:
        """Whose turn it is to be repeated; None where that is not all that the running requests can do."""
        num_requests = 0
        for decodes in self.decodes:
            num_requests += len(decodes.step.requests)
        return self.decodes[0] if num_requests == len(self.running) > 0 else None

    def end_turn(self) -> None:
        """The others' turns come before the one that was had now."""
        if len(self.decodes) > 1:
            self.decodes.append(self.decodes.pop(0))

    def take_turns(self, decodes: DecodeSteps) -> None:
        """Let the requests of a step that was made take turns with those of the steps before it."""
        if len(self.decodes) > 0:
            now = set(decodes.step.requests)
            self.decodes[:] = [before for before in self.decodes if now.isdisjoint(before.step.requests)]
        self.decodes.append(decodes)

    def add(self, request: Request) -> None:
        """Let a new request wait."""
        self.decodes.clear()
        request.order = self._num_added
        self._num_added += 1
        self.waiting.add(request)
        self.by_id[request.req_id] = request

    def wait_for(self, req_id: str, reason: str, *, is_there: bool) -> None:
        """Note that a request waits for something, or does so no longer. Unknown ids and reasons are ignored."""
        request = self.by_id.get(req_id)
        if request is None:
            return
        self.decodes.clear()
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
        """Let a running request wait, holding no blocks."""
        self.decodes.clear()
        self.running.remove(request)
        self._kv_cache.free(request)
        request.spec_token_ids = []
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request)

    def waiting_holders(self) -> list[Request]:
        """Requests that wait with blocks, those that came last first."""
        return [
            request
            for request in reversed(self.by_id.values())
            if request.status is not RequestStatus.RUNNING and self._kv_cache.holds(request)
        ]

    def finish(self, request: Request) -> None:
        """End a request wherever it is, unless it has ended."""
        if request.status is RequestStatus.FINISHED:
            return
        self.decodes.clear()
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

    def break_off(self, request: Request, error: Exception) -> EngineCoreOutput:
        """Last output of a request for which a part of the scheduler failed; other requests go on."""
        logger.error("Request %s ends, since the scheduler failed for it", request.req_id, exc_info=error)
        if request.status is not RequestStatus.FINISHED:
            self._remove(request)
        why = f"The scheduler failed for this request with {type(error).__name__}: {error}"
        return make_output(request, [], FinishReason.ERROR, error=why)

    def _remove(self, request: Request) -> None:
        """End a request whose admission or results were cut short, so that its status may not say where it is."""
        self.decodes.clear()
        self._kv_cache.take_back(request)
        (self.running if request in self.running else self.waiting).remove(request)
        if request.status is RequestStatus.RUNNING:
            self.finished_req_ids.add(request.req_id)
        request.status = RequestStatus.FINISHED
        self.by_id.pop(request.req_id, None)
