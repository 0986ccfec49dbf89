"""Figures from repeated measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the closest ranks, as numpy does."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below, above = math.floor(rank), math.ceil(rank)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Mean, median, extremes, percentiles, and spread: (largest - smallest) / median."""
    median = statistics.median(values)
    return {
        "mean": statistics.fmean(values),
        "median": median,
        "min": min(values),
        "max": max(values),
        "spread": (max(values) - min(values)) / median if median else 0.0,
        "percentiles": {str(percent): percentile(values, percent) for percent in _PERCENTILES},
    }
