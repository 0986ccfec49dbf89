"""Signals and garbage collection of a command's process."""

from __future__ import annotations

import gc
import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 128 + signal.SIGINT


def leave_at_once(number: int, _frame: FrameType | None) -> None:
    """Signal handler of a process without anything to clean up."""
    os._exit(128 + number)


def postpone_collection() -> None:
    """Turn the garbage collector off until `begin_collection`.

    Objects of start-up, most of them of imported modules, live as long as the process. Collections among them took up
    to a tenth of the time until the first character.
    """
    gc.disable()


def begin_collection() -> None:
    """Collect garbage from here on, among new objects only, if it was postponed."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
