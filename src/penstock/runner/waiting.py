"""Waiting for the device with a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.errors import WaitTimeout

_POLL_INTERVAL_S = 50e-6


def wait_until(is_done: Callable[[], bool], timeout_s: float, describe: Callable[[], str]) -> None:
    """Poll until `is_done()`.

    describe: text of the wait for the error. Raises WaitTimeout after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            raise WaitTimeout(f"{describe()} The device hangs or is overloaded.")
        time.sleep(_POLL_INTERVAL_S)
