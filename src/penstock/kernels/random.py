"""A counter-based random stream: the number depends on (seed, position) alone.

SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), with the seed mixed
first, so that neighbouring seeds do not give shifted copies of one stream. Any draw can be repeated on its own:
it does not matter which requests share the batch, or how the steps fall.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift: torch's own keeps the sign of int64."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def counter_uniform(seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """float64 [R] in [0, 1), with 53 random bits each; seeds and positions are int64 [R]."""
    bits = _mix(_mix(seeds_R) + (positions_R + 1) * _GAMMA)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53
