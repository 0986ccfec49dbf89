"""`penstock env`: what to paste into a report of a bug."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from penstock.cli.failures import readable_errors


def env(
    json: Annotated[bool, typer.Option("--json", help="Write JSON instead of text")] = False,
) -> None:
    """Show versions, machine and limits, to paste into a report.

    It names no files, users or hosts, and of the environment only variables that cannot be secrets.
    """
    with readable_errors():
        from penstock.cli.environment import as_text, collect

        sections = collect()
        print(json_module.dumps(sections, indent=2) if json else as_text(sections))
