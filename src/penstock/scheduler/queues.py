"""Who waits, and in which order."""

from __future__ import annotations

import bisect
import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict

from penstock.scheduler.request import Request


class WaitingQueue(ABC):
    """Requests that hold no blocks. At most one per req_id."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of waiting requests."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Let a new request wait."""

    @abstractmethod
    def put_back(self, request: Request) -> None:
        """Let a preempted request wait. Of several, the one preempted last runs first among equals."""

    @abstractmethod
    def peek(self) -> Request | None:
        """The request whose turn it is, which stays."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take a waiting request out of the queue, wherever it is."""

    @abstractmethod
    def admit(self, running: list[Request]) -> None:
        """Move the request whose turn it is into `running`, which is kept so that its last is preempted first."""


class FcfsQueue(WaitingQueue):
    """First come, first served; preempted requests come before new ones."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.req_id] = request

    def put_back(self, request: Request) -> None:
        self._requests[request.req_id] = request
        self._requests.move_to_end(request.req_id, last=False)

    def peek(self) -> Request | None:
        return next(iter(self._requests.values()), None)

    def remove(self, request: Request) -> None:
        del self._requests[request.req_id]

    def admit(self, running: list[Request]) -> None:
        running.append(self._requests.popitem(last=False)[1])


class PriorityQueue(WaitingQueue):
    """Lower priority numbers first, then earlier arrivals. Adding and removing cost O(log n), amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        # A removed request stays in the heap until it surfaces, or until the heap is more stale than not.
        self._waiting: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        self._waiting[request.req_id] = request
        heapq.heappush(self._heap, (request.service_order, request))

    def put_back(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request | None:
        while self._heap:
            request = self._heap[0][1]
            if self._waiting.get(request.req_id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        del self._waiting[request.req_id]
        if len(self._heap) > 2 * len(self._waiting) + 8:
            self._heap = [(waiting.service_order, waiting) for waiting in self._waiting.values()]
            heapq.heapify(self._heap)

    def admit(self, running: list[Request]) -> None:
        request = self.peek()
        assert request is not None
        heapq.heappop(self._heap)
        del self._waiting[request.req_id]
        bisect.insort(running, request, key=lambda other: other.service_order)


def make_waiting_queue(policy: str) -> WaitingQueue:
    """The queue of a `SchedulerConfig.policy`."""
    return PriorityQueue() if policy == "priority" else FcfsQueue()
