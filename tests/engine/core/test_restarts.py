"""Failure counts and backoff of restarts."""

from __future__ import annotations

import pytest

from penstock.engine.core import restarts
from penstock.engine.core.restarts import FailureCount, restart_backoff_s


class Clock:
    """Manual clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(restarts, "time", self)

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_failures_count_until_there_is_a_result() -> None:
    failures = FailureCount()
    errors = [ValueError(str(number)) for number in range(4)]
    for error in errors[:3]:
        failures.note_start()
        failures.note(error)
    assert (failures.number, failures.first) == (3, errors[0])
    failures.note_result()
    assert failures.number == 0
    failures.note(errors[3])
    assert (failures.number, failures.first) == (1, errors[3])


def test_standing_by_for_a_while_is_as_good_as_a_result(clock: Clock) -> None:
    failures = FailureCount()
    failures.note(ValueError())
    failures.note_start()
    clock.now_s += 29.0
    failures.note_idle()
    assert failures.number == 1
    clock.now_s += 2.0
    failures.note_idle()
    assert failures.number == 0


def test_what_does_not_start_does_not_stand_by(clock: Clock) -> None:
    failures = FailureCount()
    failures.note_start()
    for number in range(1, 4):
        clock.now_s += 1.0
        failures.note(ValueError())
        clock.now_s += 1000.0
        failures.note_idle()
        assert failures.number == number


def test_pauses_grow_up_to_a_limit() -> None:
    pauses = [restart_backoff_s(number) for number in range(12)]
    assert pauses[:4] == [0.0, 0.0, 0.2, 0.4]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 5.0
