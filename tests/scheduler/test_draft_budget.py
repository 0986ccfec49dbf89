"""Draft lengths against a simulated engine whose best lengths are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from penstock.contract import SamplingParams
from penstock.scheduler.draft_budget import AdaptiveBudget, DraftBudget
from penstock.scheduler.request import Request
from penstock.scheduler.step_times import StepTimes

MOST = 4
# Weights are read once per step: tokens are nearly free. Or each token costs as much as the first.
FLAT = [(1, 1.0), (2, 1.01), (4, 1.02), (64, 1.3)]
STEEP = [(1, 1.0), (2, 2.0), (64, 64.0)]


def make_requests(num: int, **params: int) -> list[Request]:
    return [Request(f"r{index}", [1], SamplingParams(seed=0, **params)) for index in range(num)]


class Engine:
    """Steps one at a time. rate: with which chance each draft of a request is right. time: that a step takes."""

    def __init__(
        self,
        costs: list[tuple[int, float]],
        requests: Sequence[Request],
        rate: Callable[[int, int], float],
        *,
        speculating: float = 0.0,
        has_idea: bool = True,
    ) -> None:
        self.budget = AdaptiveBudget(MOST, StepTimes(costs), measures_time=True)
        self.requests = requests
        self.rate = rate
        self.counts: list[list[int]] = []
        self.num_tokens = 0
        self.seconds = 0.0
        self._costs = costs
        self._speculating = speculating
        self._has_idea = has_idea
        self._rng = random.Random(1)
        self._drafts = [0] * len(requests)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            step_id, counts = len(self.counts), self._drafts
            self.counts.append(counts)
            wanted = self.budget.plan(step_id, self.requests)
            for index, (request, count) in enumerate(zip(self.requests, counts, strict=True)):
                accepted = 0
                while accepted < count and self._rng.random() < self.rate(index, step_id):
                    accepted += 1
                if count:
                    self.budget.note_results(request, count, accepted)
                self.num_tokens += 1 + accepted
            size = len(self.requests) + sum(counts)
            sizes, times = zip(*self._costs, strict=True)
            speculates = wanted > 0 or any(counts)
            seconds = float(np.interp(size, sizes, times)) + self._speculating * speculates
            self.budget.note_time(len(self.requests), sum(counts), seconds, speculates=speculates)
            self.seconds += seconds
            self._drafts = [
                self.budget.num_for(request) if wanted and self._has_idea else 0 for request in self.requests
            ]
            if any(self._drafts):
                self.budget.note_drafts()

    def share(self, start: int) -> float:
        """Share of the possible draft tokens since a step."""
        counts = self.counts[start:]
        return sum(map(sum, counts)) / (len(counts) * MOST * len(self.requests))


def test_where_tokens_cost_nothing_all_good_drafts_are_verified() -> None:
    engine = Engine(FLAT, make_requests(1), lambda index, step: 0.9)
    engine.run(200)
    assert engine.share(50) > 0.95


@pytest.mark.parametrize("num_reqs", [1, 32])
def test_drafts_that_are_never_right_cost_next_to_nothing(num_reqs: int) -> None:
    engine = Engine(FLAT, make_requests(num_reqs), lambda index, step: 0.0, speculating=0.05)
    engine.run(2000)
    plain = 2000 * float(np.interp(num_reqs, *zip(*FLAT, strict=True)))
    assert engine.seconds < plain * 1.01
    # But some request is tried again and again.
    assert 4 <= sum(any(counts) for counts in engine.counts[1000:]) <= 10


def test_where_each_token_costs_a_step_no_request_drafts() -> None:
    engine = Engine(STEEP, make_requests(8), lambda index, step: 0.8)
    engine.run(1000)
    assert engine.share(100) < 0.02


def test_what_speculation_costs_by_itself_counts() -> None:
    engine = Engine(FLAT, make_requests(1), lambda index, step: 0.5, speculating=3.0)
    engine.run(1000)
    assert engine.share(100) < 0.05


def test_drafting_comes_back_when_drafts_are_right_again() -> None:
    engine = Engine(FLAT, make_requests(4), lambda index, step: 0.0 if step < 1000 else 0.9)
    engine.run(2000)
    assert sum(map(sum, engine.counts[500:1000])) < 20
    assert sum(map(sum, engine.counts[1600:])) > 0.9 * 400 * 4 * MOST


def test_each_request_is_judged_by_its_own_drafts() -> None:
    costly = [(1, 1.0), (8, 1.1), (64, 4.0)]
    engine = Engine(costly, make_requests(8), lambda index, step: 0.95 if index < 4 else 0.0)
    engine.run(600)
    by_request = np.array(engine.counts[100:]).sum(axis=0)
    assert by_request[4:].max() < by_request[:4].min() / 4
    # They are tried again at times.
    assert by_request[4:].min() > 0


def test_a_fuller_step_has_fewer_drafts_of_each() -> None:
    costs = [(1, 1.0), (16, 1.1), (32, 2.0), (256, 16.0)]
    shares = []
    for num_reqs in (1, 6, 30):
        engine = Engine(costs, make_requests(num_reqs), lambda index, step: 0.8)
        engine.run(300)
        shares.append(engine.share(100))
    assert shares[0] > 0.9
    assert shares[0] > shares[1] > shares[2] + 0.2
    assert shares[2] < 0.05


def test_without_ideas_no_request_is_asked_most_of_the_time() -> None:
    engine = Engine(FLAT, make_requests(4), lambda index, step: 0.9, has_idea=False)
    asked = []
    plan = engine.budget.plan

    def note(step_id: int, requests: Sequence[Request]) -> int:
        asked.append(plan(step_id, requests) > 0)
        return int(asked[-1])

    engine.budget.plan = note  # type: ignore[method-assign]
    engine.run(1000)
    # Three steps in a row, and then none for 48.
    assert 0 < sum(asked[200:]) < 0.07 * 800


def test_speculation_is_never_much_worse_than_none_and_as_good_as_it_can_be() -> None:
    for rate in (0.0, 0.2, 0.5, 0.8, 0.95):
        for costs in (FLAT, STEEP, [(1, 1.0), (8, 1.6), (64, 8.0)]):
            engine = Engine(costs, make_requests(2), lambda index, step, rate=rate: rate)  # type: ignore[misc]
            engine.run(1500)
            speeds = []
            for count in range(MOST + 1):
                tokens = 2 * sum(rate**number for number in range(count + 1))
                speeds.append(tokens / float(np.interp(2 + 2 * count, *zip(*costs, strict=True))))
            assert engine.num_tokens / engine.seconds > 0.95 * max(speeds), (rate, costs)


def test_a_request_may_want_fewer() -> None:
    for budget in (DraftBudget(MOST), AdaptiveBudget(MOST, StepTimes(FLAT), measures_time=False)):
        requests = [*make_requests(1, num_speculative_tokens=0), *make_requests(1, num_speculative_tokens=2)]
        requests += make_requests(1)
        assert budget.plan(0, requests) == MOST
        assert [budget.num_for(request) for request in requests] == [0, 2, MOST]


def test_times_between_the_measured_sizes_and_beyond_are_drawn_out() -> None:
    times = StepTimes([(4, 2.0), (1, 1.0), (2, 1.0), (8, 4.0)])
    assert times.seconds(1, 15)[[0, 1, 2, 3, 5, 7, 15]].tolist() == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0]


def test_what_was_measured_too_long_is_noticed() -> None:
    times = StepTimes([(1, 25.0), (2, 1.0), (4, 150.0), (8, 2.5)])
    assert times.seconds(1, 7)[[0, 1, 3, 7]].tolist() == [1.0, 1.0, 2.0, 2.5]


def test_a_few_slow_steps_say_nothing() -> None:
    times = StepTimes([(1, 1.0)])
    for step in range(40):
        is_slow = step % 4 == 0
        times.note(1, 0, 1000.0 if is_slow else 1.5, speculates=False)
        times.note(1, 4, 1000.0 if is_slow else 2.5, speculates=True)
    assert times.seconds(1, 4)[[0, 4]].tolist() == [1.5, 2.5]


def test_what_each_draft_takes_is_told_from_what_speculation_takes_anyhow() -> None:
    times = StepTimes([(1, 1.0)])
    for step in range(200):
        times.note(4, 0, 1.2, speculates=False)
        times.note(4, step % 5, 1.5 + 0.1 * (step % 5), speculates=True)
    found = times.seconds(4, 8)
    assert found[0] == pytest.approx(1.2, abs=0.01)
    assert found[1:] == pytest.approx([1.5 + 0.1 * number for number in range(1, 9)], abs=0.1)


def test_steps_with_one_number_of_drafts_tell_of_others() -> None:
    times = StepTimes([(1, 1.0)])
    for _ in range(200):
        times.note(4, 0, 1.2, speculates=False)
        times.note(4, 20, 3.2, speculates=True)
    assert times.seconds(4, 20)[[0, 10, 20]] == pytest.approx([1.2, 2.2, 3.2], abs=0.01)
