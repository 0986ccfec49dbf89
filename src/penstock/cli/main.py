"""The entry point of the `penstock` command."""

from __future__ import annotations

import signal

from penstock.cli.process import leave_at_once, postpone_collection
from penstock.observability.standard_streams import occupy_standard_descriptors, open_standard_error
from penstock.system.env import limit_spinning


def main() -> None:
    """Run the command line."""
    # Before a command runs and after it has ended there is nothing to clean up.
    signal.signal(signal.SIGINT, leave_at_once)
    occupy_standard_descriptors()
    open_standard_error()
    postpone_collection()
    limit_spinning()
    from penstock.cli.app import app

    app(prog_name="penstock")
