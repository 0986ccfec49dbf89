"""`penstock env`: what to paste into a report of a bug."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from penstock.cli.failures import readable_errors


def env(
    json: Annotated[bool, typer.Option("--json", help="Write JSON instead of text")] = False,
    capabilities: Annotated[
        bool, typer.Option("--capabilities", help="Show what works with which arrangement of workers instead")
    ] = False,
) -> None:
    """Show versions, machine and limits, to paste into a report.

    It names no files, users or hosts, and of the environment only variables that cannot be secrets.
    """
    with readable_errors():
        print(_capabilities(as_json=json) if capabilities else _report(as_json=json))


def _report(*, as_json: bool) -> str:
    from penstock.cli.environment import as_text, collect

    sections = collect()
    return json_module.dumps(sections, indent=2) if as_json else as_text(sections)


def _capabilities(*, as_json: bool) -> str:
    from penstock.cli.capabilities import as_text, cells

    return json_module.dumps(cells(), indent=2) if as_json else as_text()
