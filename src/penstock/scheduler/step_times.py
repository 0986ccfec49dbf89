"""How long a step takes by its number of tokens: measured by the workers at start, and corrected by what steps took."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Of what a step took more than the workers' measure, how much the last one counts; and how much more is still believed.
_WEIGHT, _MOST_TIMES = 0.1, 3.0


class StepTimes:
    """costs: (tokens, seconds) of steps, as workers have measured them; none stands for steps of equal length."""

    def __init__(self, costs: Sequence[tuple[int, float]]) -> None:
        by_size = sorted(costs) or [(1, 1.0)]
        self._sizes = np.array([size for size, _ in by_size], dtype=np.float64)
        # More tokens never take less.
        self._seconds = np.maximum.accumulate([seconds for _, seconds in by_size])
        self._slope = 0.0
        if len(by_size) > 1:
            self._slope = float(np.diff(self._seconds[-2:])[0] / np.diff(self._sizes[-2:])[0])
        # Beyond those: of steps without speculation, and with it; None before there was one.
        self._more_plain: float | None = None
        self._more_speculating: float | None = None

    def note(self, num_tokens: int, seconds: float, *, speculates: bool) -> None:
        """What a step took, from its decision to its results."""
        measured = float(self._by_size(np.array([num_tokens]))[0])
        before = self._more_speculating if speculates else self._more_plain
        usual = measured + (before or 0.0)
        more = min(seconds, _MOST_TIMES * usual if before is not None else seconds) - measured
        more = more if before is None else before + _WEIGHT * (more - before)
        if speculates:
            self._more_speculating = more
        else:
            self._more_plain = more

    def seconds(self, num_tokens: np.ndarray) -> np.ndarray:
        """float64, of steps with so many tokens; the first of them is that of a step without drafts."""
        seconds = self._by_size(num_tokens)
        plain = self._more_plain or 0.0
        speculating = plain if self._more_speculating is None else self._more_speculating
        # What speculation costs by itself is never less than nothing.
        seconds[1:] += max(plain, speculating)
        seconds[0] += plain
        return seconds.clip(min=1e-9)

    def _by_size(self, num_tokens: np.ndarray) -> np.ndarray:
        beyond = (num_tokens - self._sizes[-1]).clip(min=0.0) * self._slope
        seconds: np.ndarray = np.interp(num_tokens, self._sizes, self._seconds) + beyond
        return seconds
