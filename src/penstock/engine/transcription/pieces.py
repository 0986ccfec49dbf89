"""Pieces of a sound that an encoder takes at once, cut where it is quiet. Suffix: N samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.media.item import Samples

# A cut is looked for in so many last seconds of a piece, between windows of this length.
_SEARCHED_S, _WINDOW_S = 2.0, 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Part of a sound. start_s: when it begins. seconds: its length."""

    samples_N: Samples
    start_s: float
    seconds: float


def pieces_of(samples_N: Samples, rate: int, most: int) -> Iterator[Piece]:
    """Cut a sound into pieces of up to `most` samples each."""
    begin = 0
    while begin < len(samples_N):
        rest_N = samples_N[begin:]
        end = len(rest_N) if len(rest_N) <= most else _quietest(rest_N[:most], rate)
        yield Piece(rest_N[:end], begin / rate, end / rate)
        begin += end


def _quietest(samples_N: Samples, rate: int) -> int:
    """Middle of the window with the least energy, near the end."""
    window = max(1, round(_WINDOW_S * rate))
    searched = min(len(samples_N) // 2, round(_SEARCHED_S * rate))
    num_windows = max(1, searched // window)
    first = len(samples_N) - num_windows * window
    energies = (samples_N[first:].reshape(num_windows, window).astype(np.float64) ** 2).sum(axis=1)
    return first + int(energies.argmin()) * window + window // 2
