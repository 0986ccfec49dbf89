"""Costs of work that are learned while it is done: of computing prompts, and of what features do instead."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from penstock.contract import SchedulerOutput

# Measurements that are remembered.
_NUM_KEPT = 32
# Tokens of prompts from which on the time of a step tells what they cost.
_FEWEST_TOKENS = 64


class MeasuredCost:
    """Seconds of work by its sizes: a sum of these, each times a factor that is not negative.

    Factors are those of the least relative errors over the last measurements, of which a few that something else has
    made longer weigh little.

    num_sizes: such as 2 for a constant and bytes. forgets_after_s: age from which on measurements say nothing.
    """

    def __init__(
        self, num_sizes: int, *, forgets_after_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_sizes, self._forgets_after_s, self._clock = num_sizes, forgets_after_s, clock
        self._kept: deque[tuple[Sequence[float], float]] = deque(maxlen=_NUM_KEPT)
        self._noted_at = -math.inf
        self._factors: np.ndarray | None = None

    def note(self, sizes: Sequence[float], seconds: float) -> None:
        """Note a measurement: sizes of some work, and its time, above 0."""
        now = self._clock()
        if now - self._noted_at > self._forgets_after_s:
            self._kept.clear()
        self._kept.append((sizes, seconds))
        self._noted_at, self._factors = now, None

    def seconds(self, sizes: Sequence[float]) -> float | None:
        """Expected time of work of these sizes; None before it was measured, or long after."""
        if not self._kept or self._clock() - self._noted_at > self._forgets_after_s:
            return None
        if self._factors is None:
            self._factors = self._fit()
        return float(self._factors @ np.array(sizes, dtype=np.float64))

    def _fit(self) -> np.ndarray:
        """Factors: float64 [num_sizes]. The best of all choices of sizes that count."""
        sizes = np.array([sizes for sizes, _ in self._kept], dtype=np.float64)
        shares = sizes / np.array([[seconds] for _, seconds in self._kept])
        best, least = np.zeros(self._num_sizes), math.inf
        for count in range(1, self._num_sizes + 1):
            for chosen in combinations(range(self._num_sizes), count):
                columns = shares[:, chosen]
                scales = np.maximum(columns.max(axis=0), 1e-100)
                factors = np.linalg.lstsq(columns / scales, np.ones(len(shares)), rcond=None)[0] / scales
                error = float(np.square(columns @ factors - 1.0).sum())
                if (factors >= 0.0).all() and error < least:
                    best, least = np.zeros(self._num_sizes), error
                    best[list(chosen)] = factors
        return best


class ComputeTimes:
    """Time of computing tokens of prompts, learned from steps with many of them.

    A token takes a time of its own, and one for each position before it, which attention reads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cost = MeasuredCost(2, clock=clock)
        self._launched: dict[int, float] = {}
        self._last_done = -math.inf

    def launch(self, step_id: int) -> None:
        """Note the launch of a step with tokens."""
        self._launched[step_id] = self._clock()

    def done(self, step: SchedulerOutput) -> None:
        """Note that the results of a step with tokens are there. Steps run one after the other."""
        now, launched = self._clock(), self._launched.pop(step.step_id, None)
        begun, self._last_done = max(launched or -math.inf, self._last_done), now
        num_tokens = step.num_scheduled_tokens
        if launched is None or step.total_num_scheduled_tokens - len(num_tokens) < _FEWEST_TOKENS:
            return
        num_read = sum(
            num_tokens[req_id] * (first + num_tokens[req_id] / 2) for req_id, first in step.first_positions()
        )
        self._cost.note((step.total_num_scheduled_tokens, num_read), max(now - begun, 1e-6))

    def start_over(self) -> None:
        """Forget the steps in flight, which have no results."""
        self._launched.clear()

    def seconds(self, first: int, num_tokens: int) -> float | None:
        """Expected time of computing a request's tokens from position `first` on; None before any was measured."""
        return self._cost.seconds((num_tokens, num_tokens * (first + num_tokens / 2)))
