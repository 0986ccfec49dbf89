"""Adapters of one worker: least recently used ones make room, on the host and in the device's slots."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.errors import InvalidRequest

_Value = TypeVar("_Value")


@dataclass(slots=True)
class _Held(Generic[_Value]):
    """An adapter on the host."""

    value: _Value
    is_pinned: bool = False


class AdapterCache(Generic[_Value]):
    """Adapters by id, at most `capacity` on the host, and slots for `num_slots` of them on the device.

    staged: weights that are to replace those of an adapter, by its id: where they are from, and they.

    Neither a pinned adapter nor one that a running request uses makes room for another. Equal calls give equal results,
    so that all ranks hold the same adapters in the same slots.
    """

    def __init__(self, capacity: int, num_slots: int) -> None:
        self.capacity = capacity
        self.num_slots = num_slots
        # Least recently used first.
        self._held: OrderedDict[int, _Held[_Value]] = OrderedDict()
        self._slots: OrderedDict[int, int] = OrderedDict()
        # Running requests by slot; a slot may belong to an adapter that was removed.
        self._users: Counter[int] = Counter()
        self.staged: dict[int, tuple[Any, _Value]] = {}

    @property
    def ids(self) -> set[int]:
        """Adapters on the host."""
        return set(self._held)

    @property
    def slots(self) -> dict[int, int]:
        """Slots by adapter; those of removed ones, which requests still use, are not among them."""
        return dict(self._slots)

    def get(self, lora_id: int) -> _Value | None:
        """Return an adapter, which becomes the most recently used one; None for an unknown id."""
        held = self._held.get(lora_id)
        if held is None:
            return None
        self._held.move_to_end(lora_id)
        return held.value

    def peek(self, lora_id: int) -> _Value:
        """Return an adapter on the host, which counts as no use of it."""
        return self._held[lora_id].value

    def put(self, lora_id: int, value: _Value) -> None:
        """Add or replace an adapter. Raises InvalidRequest when no other one can make room for it."""
        held = self._held.get(lora_id)
        if held is None and len(self._held) >= self.capacity:
            victim = next((one for one in self._held if self._may_leave(one)), None)
            if victim is None:
                raise InvalidRequest(
                    f"There is no room for another adapter: {self.capacity} adapters are in host memory "
                    "(max_cpu_loras), and all of them are pinned or in use. Raise max_cpu_loras, or remove one."
                )
            self.remove(victim)
        self._held[lora_id] = _Held(value, held is not None and held.is_pinned)
        self._held.move_to_end(lora_id)

    def remove(self, lora_id: int) -> bool:
        """Remove an adapter; False for an unknown id.

        Requests that use it keep its slot until they end; another adapter of this id gets a slot of its own.
        """
        self._slots.pop(lora_id, None)
        return self._held.pop(lora_id, None) is not None

    def pin(self, lora_id: int) -> bool:
        """Keep an adapter on the host and, once it has one, in its slot; False for an unknown id.

        Raises InvalidRequest when pinned adapters would leave no slot for others.
        """
        held = self._held.get(lora_id)
        if held is None:
            return False
        num_pinned = sum(other.is_pinned for other in self._held.values())
        if not held.is_pinned and num_pinned >= self.num_slots:
            raise InvalidRequest(
                f"Another adapter cannot be pinned: {num_pinned} are pinned, and max_loras is {self.num_slots}."
            )
        held.is_pinned = True
        return True

    def acquire(self, lora_id: int, write: Callable[[int], None]) -> int:
        """Count a request as a user of an adapter on the host; returns its slot.

        write: fills a slot that is new; where it raises, neither slot nor user is taken.
        Raises InvalidRequest when all slots are taken by pinned adapters and by those of running requests.
        """
        self._held.move_to_end(lora_id)
        slot = self._slots.get(lora_id)
        if slot is None:
            slot = self._free_slot()
            write(slot)
            self._slots[lora_id] = slot
        self._slots.move_to_end(lora_id)
        self._users[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """Undo an `acquire`, which gave this slot."""
        self._users[slot] -= 1
        assert self._users[slot] >= 0, f"slot {slot} was released more often than acquired"

    def _free_slot(self) -> int:
        """A free slot, if need be of an adapter that makes room."""
        taken = set(self._slots.values())
        free = next((slot for slot in range(self.num_slots) if slot not in taken and not self._users[slot]), None)
        if free is not None:
            return free
        victim = next((one for one in self._slots if self._may_leave(one)), None)
        if victim is None:
            raise InvalidRequest(
                f"There is no slot for another adapter: all of max_loras={self.num_slots} are taken by pinned "
                "adapters and running requests."
            )
        return self._slots.pop(victim)

    def _may_leave(self, lora_id: int) -> bool:
        slot = self._slots.get(lora_id)
        return not self._held[lora_id].is_pinned and (slot is None or not self._users[slot])
