"""Limit of different LoRA adapters among running requests: each needs a slot on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from penstock.contract import part_of
from penstock.contract.lora import AdapterPart
from penstock.errors import InvalidRequest
from penstock.scheduler.request import Request
from penstock.scheduler.scheduler import Scheduler

_SLOT = "a slot for its adapter"


class AdapterLimit:
    """Skips waiting requests whose adapter has no slot; others go on.

    The oldest skipped request gets the slot of one adapter: later requests of that adapter wait, so that it becomes
    free once those that run have ended. So no request is starved, whatever arrives after it.

    pinned: keys of the pinned adapters, which keep their slots; changed by the owner of the limit.
    """

    def __init__(self, scheduler: Scheduler, max_loras: int, pinned: Set[int]) -> None:
        self._scheduler = scheduler
        self._max_loras = max_loras
        self._pinned = pinned
        # Skipped requests, in the order in which they were skipped.
        self._skipped: list[Request] = []
        # Running requests by adapter; pinned adapters have slots without any.
        self._users: Counter[int] = Counter()
        # Adapter whose slot the oldest skipped request gets.
        self._leaving: int | None = None

    def check_pin(self, key: int, name: str) -> None:
        """Raise InvalidRequest if pinning an adapter would leave no slot for unfinished requests of others."""
        pinned = self._pinned | {key}
        if len(pinned) < self._max_loras:
            return
        for request in self._scheduler.unfinished_requests():
            other = part_of(request.parts, AdapterPart)
            if other is not None and other.key not in pinned:
                raise InvalidRequest(
                    f"The adapter {name!r} cannot be pinned now: it would take the last of max_loras="
                    f"{self._max_loras} slots, and request {request.req_id} of adapter {other.lora_name!r} has not "
                    "ended. Pin it later, or start the engine with more slots."
                )

    def check(self, request: Request) -> None:
        """Raise InvalidRequest for a request whose adapter can never have a slot."""
        part = part_of(request.parts, AdapterPart)
        if part is not None and part.key not in self._pinned and len(self._pinned) >= self._max_loras:
            raise InvalidRequest(
                f"The adapter {part.lora_name!r} cannot run: all of max_loras={self._max_loras} slots have pinned "
                "adapters. Start the engine with more, or remove one of them."
            )

    def begin_admission(self, running: Sequence[Request]) -> None:
        """As `SchedulerFeature`."""
        self._users = Counter(key for request in running if (key := _adapter_of(request)) is not None)
        self._skipped = [request for request in self._skipped if self._scheduler.holds(request.req_id)]
        if not self._skipped:
            self._leaving = None
        elif len(self._slots) < self._max_loras or any(_adapter_of(one) in self._slots for one in self._skipped):
            skipped, self._skipped = self._skipped, []
            self._leaving = None
            for request in skipped:
                self._scheduler.ready(request.req_id, _SLOT)

    def skips(self, request: Request) -> str | None:
        """As `SchedulerFeature`."""
        key = _adapter_of(request)
        if key is None:
            return None
        # A pinned adapter may have no slot yet, where requests of others run.
        has_slot = self._users[key] > 0 or len(self._slots | {key}) <= self._max_loras
        if has_slot and not (key == self._leaving and self._is_after_skipped(request)):
            self._users[key] += 1
            return None
        self._skipped.append(request)
        if self._leaving is None:
            others = self._slots - self._pinned
            self._leaving = min(others, key=lambda one: (self._users[one], one)) if others else None
        return _SLOT

    @property
    def _slots(self) -> set[int]:
        """Adapters with slots."""
        return {key for key, count in self._users.items() if count} | self._pinned

    def _is_after_skipped(self, request: Request) -> bool:
        return any(_order(request) > _order(one) for one in self._skipped if _adapter_of(one) != self._leaving)


def _adapter_of(request: Request) -> int | None:
    part = part_of(request.parts, AdapterPart)
    return None if part is None else part.key


def _order(request: Request) -> tuple[int, int]:
    return request.priority, request.order
