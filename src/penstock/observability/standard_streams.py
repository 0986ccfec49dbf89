"""Standard streams of a process that was started with some of them closed, as services often are."""

from __future__ import annotations

import os
import sys

_STANDARD_DESCRIPTORS = (0, 1, 2)


def occupy_standard_descriptors() -> None:
    """Connect each closed standard descriptor (0, 1, 2) to the null device.

    The system gives a new file the lowest free number. Without this, a socket or the shared memory of the workers
    could become descriptor 2 of a child process, and the child's error messages would overwrite it.
    """
    for descriptor in _STANDARD_DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)


def open_standard_error() -> None:
    """Discard error messages if standard error is closed: `print(..., file=None)` would write them to the results."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it stays open until the process ends


def is_terminal() -> bool:
    """Whether standard error exists and is a terminal, so that a progress bar may be drawn on it."""
    return sys.stderr is not None and sys.stderr.isatty()
