"""Copies to the device that a step makes: each costs host time on a GPU."""

from __future__ import annotations

import pytest

from support.counting_device import CountingDevice
from support.runners import Driver, make_runner, new_request


def test_a_step_uploads_its_layout_and_once_per_owner_that_staged_something(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CountingDevice()
    monkeypatch.setattr("support.runners.create_device", lambda config: device)
    driver = Driver(make_runner())

    def uploads(*arguments: object, **changes: object) -> int:
        before = device.num_uploads
        driver.step(*arguments, **changes)  # type: ignore[arg-type]
        return device.num_uploads - before

    # Token ids and counts; block tables; length of the prefill, and the layout.
    assert uploads({"a": 3}, [new_request("a", [1, 2, 3], first_block=1)]) == 4
    more = [new_request("b", [4, 5], first_block=9), new_request("c", [6], first_block=17)]
    assert uploads({"a": 1, "b": 2, "c": 1}, more) == 4
    assert uploads({"a": 1, "b": 1, "c": 1}) == 1
    assert uploads({"a": 1, "b": 1, "c": 1}, repeats=True) == 0
    assert uploads({"a": 1, "b": 1, "c": 1}, repeats=True, new_blocks={"a": ([30],)}) == 1
    assert uploads({"a": 1, "b": 1}) == 1
