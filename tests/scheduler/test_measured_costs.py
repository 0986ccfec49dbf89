"""Costs of work that are learned from measurements."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract import CachedRequestData, SchedulerOutput
from penstock.scheduler.measured_costs import ComputeTimes, MeasuredCost


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.floats(1e-6, 1.0), st.floats(1e-12, 1e-6))
@settings(max_examples=50, deadline=None)
def test_a_constant_and_a_rate_are_found(constant: float, per_byte: float) -> None:
    cost = MeasuredCost(2)
    for power in range(10, 31):
        cost.note((1.0, 1 << power), constant + per_byte * (1 << power))
    for num_bytes in (1 << 10, 1 << 20, 1 << 30):
        assert cost.seconds((1.0, num_bytes)) == pytest.approx(constant + per_byte * num_bytes, rel=1e-3)


def test_a_few_slow_measurements_weigh_little() -> None:
    cost = MeasuredCost(2)
    for index in range(20):
        num_bytes = (index + 1) << 20
        cost.note((1.0, num_bytes), (50.0 if index % 10 == 3 else 1.0) * (0.001 + num_bytes * 1e-9))
    assert cost.seconds((1.0, 10 << 20)) == pytest.approx(0.001 + (10 << 20) * 1e-9, rel=0.25)


SIZES = st.just(0.0) | st.floats(1.0, 1e9)


@given(st.lists(st.tuples(SIZES, SIZES, st.floats(1e-6, 100.0)), min_size=1))
@settings(max_examples=100, deadline=None)
def test_no_expected_time_is_negative(measured: list[tuple[float, float, float]]) -> None:
    cost = MeasuredCost(2)
    for one, other, seconds in measured:
        cost.note((one, other), seconds)
    for sizes in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1e9, 1e9)):
        assert cost.seconds(sizes) >= 0.0  # type: ignore[operator]


def test_nothing_is_known_before_the_first_measurement_and_long_after_the_last() -> None:
    clock = Clock()
    cost = MeasuredCost(1, forgets_after_s=60.0, clock=clock)
    assert cost.seconds((1.0,)) is None
    cost.note((1.0,), 2.0)
    clock.now += 60.0
    assert cost.seconds((3.0,)) == pytest.approx(6.0)
    clock.now += 0.5
    assert cost.seconds((3.0,)) is None
    # What was forgotten does not come back with the next one.
    cost.note((1.0,), 4.0)
    assert cost.seconds((3.0,)) == pytest.approx(12.0)


def step(step_id: int, **tokens: tuple[int, int]) -> SchedulerOutput:
    """A step; tokens: first position and number by request."""
    names = list(tokens)
    return SchedulerOutput(
        step_id=step_id,
        scheduled_cached_reqs=CachedRequestData(
            req_ids=names, new_block_ids=[None] * len(names), num_computed_tokens=[tokens[name][0] for name in names]
        ),
        num_scheduled_tokens={name: number for name, (_, number) in tokens.items()},
        total_num_scheduled_tokens=sum(number for _, number in tokens.values()),
    )


def test_computing_takes_longer_behind_more_tokens_and_steps_wait_for_each_other() -> None:
    clock = Clock()
    times = ComputeTimes(clock)
    assert times.seconds(0, 100) is None
    # 1 ms for a token, and 1 us for each position before it: two steps in flight, the second one behind the first.
    times.launch(0)
    times.launch(1)
    clock.now += 0.512 + 512 * 256e-6
    times.done(step(0, a=(0, 512)))
    clock.now += 0.512 + 512 * (512 + 256) * 1e-6
    times.done(step(1, a=(512, 512)))
    # Nothing runs for a while, and no such time is a step's.
    clock.now += 1000.0
    times.launch(2)
    clock.now += 0.2 + 100 * 50e-6 + 100 * (1000 + 50) * 1e-6
    times.done(step(2, b=(0, 100), c=(1000, 100)))
    assert times.seconds(0, 1000) == pytest.approx(1.0 + 0.5, rel=0.01)
    assert times.seconds(4000, 1000) == pytest.approx(1.0 + 4.5, rel=0.01)


def test_decodes_and_results_of_unknown_steps_say_nothing() -> None:
    clock = Clock()
    times = ComputeTimes(clock)
    times.launch(0)
    clock.now += 1.0
    times.done(step(0, **{f"r{index}": (100, 1) for index in range(100)}))
    times.launch(1)
    times.start_over()
    times.done(step(1, a=(0, 512)))
    assert times.seconds(0, 100) is None
