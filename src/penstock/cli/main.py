"""The entry point of the `penstock` command."""

from __future__ import annotations

import os
import signal
from types import FrameType

from penstock.cli.collector import postpone_collection
from penstock.observability.standard_streams import occupy_standard_descriptors, open_standard_error

EXIT_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command line."""
    # Before a command runs and after it has ended there is nothing to clean up.
    signal.signal(signal.SIGINT, leave_at_once)
    occupy_standard_descriptors()
    open_standard_error()
    postpone_collection()
    from penstock.cli.app import app

    app(prog_name="penstock")


def leave_at_once(number: int, _frame: FrameType | None) -> None:
    """A signal handler for where nothing has to be cleaned up."""
    os._exit(128 + number)
