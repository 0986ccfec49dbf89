"""Cache of adapters: least recently used ones make room, on the host and in the device's slots."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.errors import InvalidRequest

_Value = TypeVar("_Value")


class AdapterCache(Generic[_Value]):
    """Adapters by id, at most `capacity` on the host, and slots for `num_slots` of them on the device.

    Neither a pinned adapter nor one that a running request uses makes room for another. Equal calls give equal results,
    so that all ranks hold the same adapters in the same slots.
    """

    def __init__(self, capacity: int, num_slots: int) -> None:
        self.capacity = capacity
        self.num_slots = num_slots
        # Least recently used first.
        self._values: OrderedDict[int, _Value] = OrderedDict()
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._free_slots = list(range(num_slots - 1, -1, -1))
        # Running requests by slot; a slot may belong to an adapter that was removed.
        self._users: Counter[int] = Counter()
        self._pinned: set[int] = set()

    def __contains__(self, lora_id: int) -> bool:
        return lora_id in self._values

    @property
    def ids(self) -> set[int]:
        """Adapters on the host."""
        return set(self._values)

    @property
    def slots(self) -> dict[int, int]:
        """Slots by adapter; those of removed ones, which requests still use, are not among them."""
        return dict(self._slots)

    def get(self, lora_id: int) -> _Value | None:
        """Return an adapter, which becomes the most recently used one; None for an unknown id."""
        if lora_id not in self._values:
            return None
        self._values.move_to_end(lora_id)
        return self._values[lora_id]

    def peek(self, lora_id: int) -> _Value:
        """Return an adapter on the host, which counts as no use of it."""
        return self._values[lora_id]

    def put(self, lora_id: int, value: _Value) -> None:
        """Add or replace an adapter. Raises InvalidRequest when no other one can make room for it."""
        if lora_id not in self._values and len(self._values) >= self.capacity:
            victim = next((one for one in self._values if self._may_leave(one)), None)
            if victim is None:
                raise InvalidRequest(
                    f"There is no room for another adapter: {self.capacity} adapters are in host memory "
                    "(max_cpu_loras), and all of them are pinned or in use. Raise max_cpu_loras, or remove one."
                )
            self.remove(victim)
        self._values[lora_id] = value
        self._values.move_to_end(lora_id)

    def remove(self, lora_id: int) -> bool:
        """Remove an adapter; False for an unknown id.

        Requests that use it keep its slot until they end; another adapter of this id gets a slot of its own.
        """
        if self._values.pop(lora_id, None) is None:
            return False
        self._pinned.discard(lora_id)
        slot = self._slots.pop(lora_id, None)
        if slot is not None and not self._users[slot]:
            self._free_slots.append(slot)
        return True

    def pin(self, lora_id: int) -> bool:
        """Keep an adapter on the host and, once it has one, in its slot; False for an unknown id.

        Raises InvalidRequest when pinned adapters would leave no slot for others.
        """
        if lora_id not in self._values:
            return False
        if len(self._pinned | {lora_id}) > self.num_slots:
            raise InvalidRequest(
                f"Another adapter cannot be pinned: {len(self._pinned)} are pinned, and max_loras is {self.num_slots}."
            )
        self._pinned.add(lora_id)
        return True

    def acquire(self, lora_id: int, write: Callable[[int], None]) -> int:
        """Count a request as a user of an adapter on the host; returns its slot.

        write: fills a slot that is new; where it raises, neither slot nor user is taken.
        Raises InvalidRequest when all slots are taken by pinned adapters and by those of running requests.
        """
        self._values.move_to_end(lora_id)
        slot = self._slots.get(lora_id)
        if slot is None:
            slot = self._free_slot()
            write(slot)
            self._free_slots.remove(slot)
            self._slots[lora_id] = slot
        self._slots.move_to_end(lora_id)
        self._users[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """Undo an `acquire`, which gave this slot."""
        self._users[slot] -= 1
        assert self._users[slot] >= 0, f"slot {slot} was released more often than acquired"
        if not self._users[slot] and slot not in self._slots.values():
            self._free_slots.append(slot)

    def _free_slot(self) -> int:
        """A free slot, if need be of an adapter that makes room."""
        if not self._free_slots:
            victim = next((one for one in self._slots if self._may_leave(one)), None)
            if victim is None:
                raise InvalidRequest(
                    f"There is no slot for another adapter: all of max_loras={self.num_slots} are taken by pinned "
                    "adapters and running requests."
                )
            self._free_slots.append(self._slots.pop(victim))
        return self._free_slots[-1]

    def _may_leave(self, lora_id: int) -> bool:
        slot = self._slots.get(lora_id)
        return lora_id not in self._pinned and (slot is None or not self._users[slot])
