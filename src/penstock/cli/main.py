"""The entry point of the `penstock` command."""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command line."""
    # Before a command runs and after it has ended there is nothing to clean up.
    signal.signal(signal.SIGINT, _leave_at_once)
    from penstock.cli.app import app

    app(prog_name="penstock")


def _leave_at_once(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)
