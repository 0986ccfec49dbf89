"""Figures from repeated measurements, beside numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.statistics import summary

VALUES = st.lists(st.floats(0.001, 1000), min_size=1, max_size=50)


@given(VALUES)
def test_spread_is_relative_to_the_median(values: list[float]) -> None:
    figures = summary(values)
    assert figures["median"] == pytest.approx(float(np.median(values)))
    assert figures["spread"] == pytest.approx((max(values) - min(values)) / float(np.median(values)))
