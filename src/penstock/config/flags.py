"""Flags of options on the command line, where a flag is more than an option's name and docstring."""

from __future__ import annotations

from typing import Any


def listed(help: str, *, flag: str | None = None, metavar: str | None = None) -> dict[str, Any]:
    """Metadata of an option whose flag is in the help of every command with an engine.

    help: short meaning. flag: another name than the option's. metavar: form of its values, which for
    an integer may be other texts too.
    """
    given = {"help": help, "flag": flag, "metavar": metavar}
    return {name: value for name, value in given.items() if value is not None}
