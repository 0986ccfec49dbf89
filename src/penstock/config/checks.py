"""The checks that all option files share, each with the house's kind of message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.errors import ConfigError


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    allowed = list(choices)
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not valid. Allowed: {', '.join(allowed)}.")


def check_integer(name: str, value: Any, minimum: int) -> None:
    """Raise ConfigError unless `value` is an integer of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name}={value!r} is not valid. Allowed: an integer of at least {minimum}.")


def check_flag(name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not valid. Allowed: True or False.")
