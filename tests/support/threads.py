"""Threads of this process, as the system counts them."""

from __future__ import annotations

import time

import psutil

from support.waiting import PATIENCE_S


def num_threads(most: int | None = None) -> int:
    """Number of threads. most: expected number; the system may count a joined thread a moment longer."""
    deadline = time.monotonic() + PATIENCE_S
    count: int = psutil.Process().num_threads()
    while most is not None and count > most and time.monotonic() < deadline:
        time.sleep(0.01)
        count = psutil.Process().num_threads()
    return count
