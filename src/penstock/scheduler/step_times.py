"""How long a step takes by its number of tokens: measured by the workers at start, and corrected by what steps took."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# How much the last step without drafts counts, and how much of what is known of steps with drafts the next one leaves.
_WEIGHT, _MEMORY = 0.25, 0.95
# What a step is believed to take at most, of what was expected: others use the machine too.
_MOST_TIMES = 3.0


class StepTimes:
    """costs: (tokens, seconds) of steps, as workers have measured them; none stands for steps of equal length.

    What real steps take beyond that is learned: of steps without drafts their mean; of others a line over their number
    of drafts.
    """

    def __init__(self, costs: Sequence[tuple[int, float]]) -> None:
        by_size = sorted(costs) or [(1, 1.0)]
        self._sizes = np.array([size for size, _ in by_size], dtype=np.float64)
        # More tokens never take less.
        self._seconds = np.maximum.accumulate([seconds for _, seconds in by_size])
        self._slope = 0.0
        if len(by_size) > 1:
            self._slope = float(np.diff(self._seconds[-2:])[0] / np.diff(self._sizes[-2:])[0])
        # Of steps without drafts; None before there was one.
        self._more: float | None = None
        # Of the others, weighted sums: 1, drafts, drafts squared, seconds more, drafts times seconds more.
        self._sums = np.zeros(5)

    def note(self, num_reqs: int, num_drafts: int, seconds: float, *, speculates: bool) -> None:
        """What a step took, from its decision to its results. speculates: it verified drafts, or made some."""
        measured = float(self._by_size(np.array([num_reqs + num_drafts]))[0])
        if not speculates:
            if self._more is None:
                self._more = seconds - measured
            else:
                more = min(seconds, _MOST_TIMES * (measured + self._more)) - measured
                self._more += _WEIGHT * (more - self._more)
            return
        if self._sums[0] > 1.0:
            fixed, each = self._line()
            seconds = min(seconds, _MOST_TIMES * (measured + fixed + each * num_drafts))
        more = seconds - measured
        self._sums *= _MEMORY
        self._sums += [1.0, num_drafts, num_drafts**2, more, num_drafts * more]

    def seconds(self, num_reqs: int, most_drafts: int) -> np.ndarray:
        """float64 [1 + most_drafts], of steps in which so many requests decode, by the number of their drafts."""
        num_drafts = np.arange(1 + most_drafts)
        seconds = self._by_size(num_reqs + num_drafts)
        fixed, each = self._line()
        seconds[1:] += fixed + each * num_drafts[1:]
        seconds[0] += self._more or 0.0
        return seconds.clip(min=1e-9)

    def _line(self) -> tuple[float, float]:
        """What steps that speculate take beyond the measure: in any case, and for each draft; never less than nothing.

        The line is held, with the weight of one step, where steps without drafts are: that tells what each draft takes
        even if all steps have had the same number of them.
        """
        plain = self._more or 0.0
        weight, drafts, squares, more, products = (self._sums + np.array([1.0, 0.0, 0.0, plain, 0.0])).tolist()
        spread = weight * squares - drafts**2
        each = max(0.0, (weight * products - drafts * more) / spread) if spread > 0.0 else 0.0
        return max(plain, (more - each * drafts) / weight), each

    def _by_size(self, num_tokens: np.ndarray) -> np.ndarray:
        beyond = (num_tokens - self._sizes[-1]).clip(min=0.0) * self._slope
        seconds: np.ndarray = np.interp(num_tokens, self._sizes, self._seconds) + beyond
        return seconds
