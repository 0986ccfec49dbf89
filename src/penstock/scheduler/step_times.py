"""Step time by number of tokens: measured at start, corrected by observed steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

# Window of observed steps without and with draft tokens; and steps between two fits.
_NUM_PLAIN, _NUM_SPECULATING, _NUM_BETWEEN = 9, 32, 4


class StepTimes:
    """Model of step times. costs: (tokens, seconds), as measured by the workers; empty means equal times.

    The time beyond the measured one is learned from the last steps: a median for steps without draft tokens, a line
    over the number of draft tokens for the others. Both are robust against a few slow steps.
    """

    def __init__(self, costs: Sequence[tuple[int, float]]) -> None:
        by_size = sorted(costs) or [(1, 1.0)]
        self._sizes = np.array([size for size, _ in by_size], dtype=np.float64)
        # Noise only makes measured times longer: fewer tokens never take longer, nor twice as many more than twice.
        self._seconds = np.minimum.accumulate([seconds for _, seconds in reversed(by_size)])[::-1].copy()
        for index in range(1, len(by_size)):
            most = self._seconds[index - 1] * self._sizes[index] / self._sizes[index - 1]
            self._seconds[index] = min(self._seconds[index], most)
        self._slope = 0.0
        if len(by_size) > 1:
            self._slope = float(np.diff(self._seconds[-2:])[0] / np.diff(self._sizes[-2:])[0])
        # Measured time by number of tokens, cached.
        self._of_one_size: dict[int, float] = {}
        # Seconds beyond the measured time: steps without draft tokens; draft tokens and seconds of the others.
        self._plain: deque[float] = deque(maxlen=_NUM_PLAIN)
        self._drafts: deque[float] = deque(maxlen=_NUM_SPECULATING)
        self._speculating: deque[float] = deque(maxlen=_NUM_SPECULATING)
        self._num_noted = 0
        self._fixed = self._each = 0.0

    def note(self, num_reqs: int, num_drafts: int, seconds: float, *, speculates: bool) -> None:
        """Note the time of a step from scheduling to its results. speculates: it verified or made draft tokens."""
        num_tokens = num_reqs + num_drafts
        if num_tokens not in self._of_one_size:
            self._of_one_size[num_tokens] = float(self._by_size(np.array([num_tokens]))[0])
        more = seconds - self._of_one_size[num_tokens]
        if not speculates:
            self._plain.append(more)
            return
        self._drafts.append(num_drafts)
        self._speculating.append(more)
        if self._num_noted % _NUM_BETWEEN == 0:
            self._fixed, self._each = self._draw_line()
        self._num_noted += 1

    def seconds(self, num_reqs: int, most_drafts: int) -> np.ndarray:
        """Return expected step times of so many decodes by number of draft tokens: float64 [1 + most_drafts]."""
        plain = self._more_plain
        num_drafts = np.arange(1 + most_drafts)
        seconds = self._by_size(num_reqs + num_drafts)
        seconds[1:] += max(plain, self._fixed) + self._each * num_drafts[1:]
        seconds[0] += plain
        return seconds.clip(min=1e-9)

    @property
    def _more_plain(self) -> float:
        return median(self._plain) if self._plain else 0.0

    def _draw_line(self) -> tuple[float, float]:
        """Fit seconds beyond the measured time of speculating steps: constant, and per draft token (not negative).

        Theil-Sen estimator over pairs of steps. Steps without draft tokens are included, half as many, so that the
        slope is known even if all other steps had equally many draft tokens.
        """
        num_plain = -(-len(self._drafts) // 2)
        drafts = np.array([*self._drafts, *[0.0] * num_plain])
        more = np.array([*self._speculating, *[self._more_plain] * num_plain])
        apart = drafts[:, np.newaxis] - drafts
        is_pair = apart > 0.0
        slopes = (more[:, np.newaxis] - more)[is_pair] / apart[is_pair]
        each = max(0.0, float(np.median(slopes))) if len(slopes) else 0.0
        return median(np.subtract(self._speculating, np.multiply(self._drafts, each)).tolist()), each

    def _by_size(self, num_tokens: np.ndarray) -> np.ndarray:
        beyond = (num_tokens - self._sizes[-1]).clip(min=0.0) * self._slope
        seconds: np.ndarray = np.interp(num_tokens, self._sizes, self._seconds) + beyond
        return seconds
