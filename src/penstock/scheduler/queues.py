"""Who waits, and in which order."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from penstock.scheduler.request import Request

# What sorts first runs first; what sorts last is preempted first.
_ServiceOrder = Callable[[Request], tuple[float, ...]]
_ORDERS: dict[str, _ServiceOrder] = {
    "fcfs": lambda request: (request.order,),
    "priority": lambda request: (request.priority, request.arrival_time, request.order),
}


class WaitingQueue:
    """Requests that hold no blocks, in the order of a `SchedulerConfig.policy`. At most one per req_id."""

    def __init__(self, policy: str) -> None:
        self._order = _ORDERS[policy]
        self._requests: list[Request] = []

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Let a new request wait, or one that was preempted."""
        bisect.insort(self._requests, request, key=self._order)

    def peek(self) -> Request | None:
        """The request whose turn it is, which stays."""
        return self._requests[0] if self._requests else None

    def remove(self, request: Request) -> None:
        """Take a waiting request out of the queue, wherever it is."""
        index = bisect.bisect_left(self._requests, self._order(request), key=self._order)
        assert self._requests[index] is request
        del self._requests[index]

    def admit(self, running: list[Request]) -> None:
        """Move the request whose turn it is into `running`, which is in the same order."""
        bisect.insort(running, self._requests.pop(0), key=self._order)
