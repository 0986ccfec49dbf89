"""Support of torch in forked child processes."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

# omp_pause_hard
_PAUSE_HARD = 2


@functools.cache
def keep_forks_computing() -> None:
    """Let processes that Python forks use torch and create engines of their own.

    A child has none of its parent's threads, but GCC's OpenMP runtime, which torch ships, still waits for those of the
    forking thread, forever. So its thread pool is shut down before a fork, and restarts at the next use. Other OpenMP
    runtimes handle forks themselves.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_end_threads)


def _end_threads() -> None:
    for runtime in _gcc_runtimes():
        runtime.omp_pause_resource_all(_PAUSE_HARD)


@functools.cache
def _gcc_runtimes() -> list[ctypes.CDLL]:
    """GCC's OpenMP runtimes, version 9 and later, that are loaded in this process."""
    try:
        paths = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return []
    found = [ctypes.CDLL(path) for path in paths if Path(path).name.startswith("libgomp")]
    return [runtime for runtime in found if hasattr(runtime, "omp_pause_resource_all")]
