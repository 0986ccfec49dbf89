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
    """Requests that hold no blocks, in the order of a `SchedulerConfig.policy`. At most one per req_id.

    Those that are not ready are passed over, and have their place in the order again once they are.
    """

    def __init__(self, policy: str) -> None:
        self._order = _ORDERS[policy]
        self._ready: list[Request] = []
        self._not_ready: set[Request] = set()

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._ready) + len(self._not_ready)

    def add(self, request: Request) -> None:
        """Let a new request wait, or one that was preempted."""
        if request.waits_for:
            self._not_ready.add(request)
        else:
            bisect.insort(self._ready, request, key=self._order)

    def peek(self) -> Request | None:
        """The request whose turn it is, which stays; None if none is ready."""
        return self._ready[0] if self._ready else None

    def remove(self, request: Request) -> None:
        """Take a waiting request out of the queue, wherever it is."""
        if request in self._not_ready:
            self._not_ready.remove(request)
            return
        index = bisect.bisect_left(self._ready, self._order(request), key=self._order)
        assert self._ready[index] is request
        del self._ready[index]

    def admit(self, running: list[Request]) -> None:
        """Move the request whose turn it is into `running`, which is in the same order."""
        bisect.insort(running, self._ready[0], key=self._order)
        del self._ready[0]
