"""The counter-based stream against SplitMix64 in Python integers, and its statistics."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.random import counter_uniform

_MASK = (1 << 64) - 1


def _mix(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def _uniform(seed: int, position: int) -> float:
    bits = _mix((_mix(seed & _MASK) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK)
    return float((bits >> 11) * 2.0**-53)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**31))
def test_equals_splitmix64(seed: int, position: int) -> None:
    drawn = counter_uniform(torch.tensor([seed]), torch.tensor([position]))
    assert drawn.item() == _uniform(seed, position)
    assert 0.0 <= drawn.item() < 1.0


def test_streams_of_neighbouring_seeds_and_positions_are_uniform_and_unrelated() -> None:
    seeds, positions = torch.meshgrid(torch.arange(400), torch.arange(400), indexing="ij")
    drawn = counter_uniform(seeds.flatten(), positions.flatten()).view(400, 400).numpy()
    counts, _ = np.histogram(drawn, bins=64, range=(0, 1))
    expected = drawn.size / 64
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 63 + 5 * np.sqrt(2 * 63)
    centred = drawn - 0.5
    for shifted in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1], centred[1:, :-1] * centred[:-1, 1:]):
        correlation = shifted.mean() * 12
        assert abs(correlation) < 5 / np.sqrt(shifted.size)
