"""Statistics of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, median, extremes, percentiles, and spread: (largest - smallest) / median."""
    median = statistics.median(values)
    return {
        "mean": statistics.fmean(values),
        "median": median,
        "min": min(values),
        "max": max(values),
        "spread": (max(values) - min(values)) / median if median else 0.0,
        "percentiles": {str(percent): float(np.percentile(values, percent)) for percent in _PERCENTILES},
    }
