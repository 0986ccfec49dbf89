"""Waits for conditions, with timeouts for slow machines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

# It only keeps a test that fails from hanging: what is waited for takes milliseconds, or seconds where processes start.
PATIENCE_S = 60.0


def wait_until(is_so: Callable[[], object], what: str = "", patience_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds. Fails after `patience_s`, with the condition's description."""
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, f"it never happened: {what}" if what else "it never happened"
        time.sleep(0.005)


async def until(is_so: Callable[[], object], what: str = "", patience_s: float = PATIENCE_S) -> None:
    """As `wait_until`, in a coroutine."""
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, f"it never happened: {what}" if what else "it never happened"
        await asyncio.sleep(0.001)


def is_running(pid: int) -> bool:
    """Whether any thread of a process runs; its main thread may have ended."""
    try:
        process = psutil.Process(pid)
        return bool(process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False
