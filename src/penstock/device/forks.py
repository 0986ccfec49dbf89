"""What keeps a process that was forked from this one able to compute."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

# omp_pause_hard
_PAUSE_HARD = 2


@functools.cache
def keep_forks_computing() -> None:
    """From now on, whatever Python forks can use torch and make engines of its own.

    A child has none of its parent's threads, but GCC's OpenMP runtime, which torch brings, goes on to count on those
    that the forking thread had, and waits for them for ever. So they end before a fork, and begin anew when they are
    needed next. The other runtimes see to it by themselves.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_end_threads)


def _end_threads() -> None:
    for runtime in _gcc_runtimes():
        runtime.omp_pause_resource_all(_PAUSE_HARD)


@functools.cache
def _gcc_runtimes() -> list[ctypes.CDLL]:
    """The OpenMP runtimes of GCC, from version 9 on, that this process has loaded."""
    try:
        paths = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return []
    found = [ctypes.CDLL(path) for path in paths if Path(path).name.startswith("libgomp")]
    return [runtime for runtime in found if hasattr(runtime, "omp_pause_resource_all")]
