"""The cache of adapters, by any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.errors import InvalidRequest
from penstock.features.lora.cache import AdapterCache

IDS = st.integers(1, 6)


def write_nothing(_: int) -> None: ...


def fail(_: int) -> None:
    raise OverflowError("the weights do not fit")


class CacheMachine(RuleBasedStateMachine):
    """Compares the cache with a model of it: which adapters may leave, and which must not."""

    @initialize(num_slots=st.integers(1, 3), more=st.integers(0, 2))
    def start(self, num_slots: int, more: int) -> None:
        self.cache: AdapterCache[int] = AdapterCache(num_slots + more, num_slots)
        self.values: dict[int, int] = {}
        # Slot of each running request, and its adapter; None for one that was removed.
        self.users: list[tuple[int, int | None]] = []
        self.pinned: set[int] = set()

    def may_leave(self, ids: set[int]) -> set[int]:
        return {one for one in ids if one not in self.pinned and one not in {used for _, used in self.users}}

    @rule(lora_id=IDS, value=st.integers())
    def put(self, lora_id: int, value: int) -> None:
        before = set(self.values)
        is_full = lora_id not in before and len(before) == self.cache.capacity
        if is_full and not self.may_leave(before):
            with pytest.raises(InvalidRequest, match="max_cpu_loras"):
                self.cache.put(lora_id, value)
            return
        self.cache.put(lora_id, value)
        left = before - self.cache.ids
        assert len(left) == is_full
        assert left <= self.may_leave(before)
        self.values = {one: held for one, held in self.values.items() if one not in left} | {lora_id: value}

    @rule(lora_id=IDS)
    def remove(self, lora_id: int) -> None:
        assert self.cache.remove(lora_id) is (lora_id in self.values)
        self.values.pop(lora_id, None)
        self.pinned.discard(lora_id)
        self.users = [(slot, None if used == lora_id else used) for slot, used in self.users]

    @rule(lora_id=IDS)
    def pin(self, lora_id: int) -> None:
        if lora_id in self.values and len(self.pinned | {lora_id}) > self.cache.num_slots:
            with pytest.raises(InvalidRequest, match="cannot be pinned"):
                self.cache.pin(lora_id)
            return
        assert self.cache.pin(lora_id) is (lora_id in self.values)
        if lora_id in self.values:
            self.pinned.add(lora_id)

    @rule(lora_id=IDS)
    def acquire(self, lora_id: int) -> None:
        if lora_id not in self.values:
            return
        before = self.cache.slots
        num_taken = len({*before.values(), *(slot for slot, _ in self.users)})
        if lora_id not in before and num_taken == self.cache.num_slots and not self.may_leave(set(before)):
            with pytest.raises(InvalidRequest, match="max_loras"):
                self.cache.acquire(lora_id, write_nothing)
            return
        written: list[int] = []
        slot = self.cache.acquire(lora_id, written.append)
        assert written == ([] if lora_id in before else [slot])
        assert written or slot == before[lora_id]
        assert not written or slot not in {used for used, _ in self.users}
        self.users.append((slot, lora_id))

    @rule(lora_id=IDS)
    def acquire_a_slot_that_cannot_be_written(self, lora_id: int) -> None:
        """Neither slot nor user is taken, as the invariants and later calls of `acquire` see."""
        before = self.cache.slots
        if lora_id not in self.values or lora_id in before:
            return
        with pytest.raises((InvalidRequest, OverflowError)):
            self.cache.acquire(lora_id, fail)
        assert lora_id not in self.cache.slots

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.users:
            user = data.draw(st.sampled_from(self.users))
            self.users.remove(user)
            self.cache.release(user[0])

    @invariant()
    def holds_what_it_must(self) -> None:
        if not hasattr(self, "cache"):
            return
        slots = self.cache.slots
        assert self.cache.ids == set(self.values)
        assert all(self.cache.get(one) == value for one, value in self.values.items() if one not in slots)
        assert len(set(slots.values())) == len(slots) <= self.cache.num_slots
        assert set(slots.values()) <= set(range(self.cache.num_slots))
        assert all(slots.get(used) == slot for slot, used in self.users if used is not None)
        assert not {slot for slot, used in self.users if used is None} & set(slots.values())
        assert set(slots) <= set(self.values)


TestCache = CacheMachine.TestCase


def test_the_least_recently_used_adapter_makes_room() -> None:
    cache: AdapterCache[str] = AdapterCache(2, 1)
    cache.put(1, "a")
    cache.put(2, "b")
    cache.get(1)
    cache.put(3, "c")
    assert cache.ids == {1, 3}


def test_a_removed_adapter_keeps_its_slot_while_a_request_uses_it() -> None:
    cache: AdapterCache[str] = AdapterCache(2, 1)
    cache.put(1, "a")
    slot = cache.acquire(1, write_nothing)
    cache.remove(1)
    # Another adapter of the same id is another one.
    cache.put(1, "b")
    with pytest.raises(InvalidRequest, match="max_loras=1"):
        cache.acquire(1, write_nothing)
    cache.release(slot)
    written: list[int] = []
    assert cache.acquire(1, written.append) == 0
    assert written == [0]


def test_a_slot_that_cannot_be_written_is_free_afterwards() -> None:
    cache: AdapterCache[str] = AdapterCache(2, 1)
    for lora_id in (1, 2):
        cache.put(lora_id, "a")
    for _ in range(3):
        with pytest.raises(OverflowError):
            cache.acquire(1, fail)
    assert cache.remove(1)
    cache.release(cache.acquire(2, write_nothing))
    assert cache.acquire(2, fail) == 0
