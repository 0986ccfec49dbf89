"""Checks of option values, and their error messages."""

from __future__ import annotations

import difflib
import json
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import ConfigError

# Limits of normal float32 numbers.
SMALLEST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)")
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}


def as_plain(value: Any, depth: int = 2) -> Any:
    """Return a value with numpy's scalars as Python's numbers, also in lists, tuples and dictionaries up to a depth."""
    kind = type(value)
    if depth and (kind is list or kind is tuple):
        return kind(as_plain(one, depth - 1) for one in value)
    if depth and kind is dict:
        return {as_plain(key, 0): as_plain(one, depth - 1) for key, one in value.items()}
    # A value of numpy's types says so without an import of numpy.
    return value.item() if kind.__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    allowed = list(choices)
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not valid. Allowed: {', '.join(allowed)}.")


def check_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """Raise ConfigError unless `value` is an integer of at least `minimum`, and at most `maximum` if that is given."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < minimum or (maximum is not None and value > maximum):
        allowed = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum:,}"
        raise ConfigError(f"{name}={value!r} is not valid. Allowed: an integer {allowed}.")


def read_dictionary(name: str, given: Any, allowed: Iterable[str], example: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an option that is a dictionary, or JSON of one, with `allowed` keys. Raises ConfigError."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{name}={given!r} is not JSON: {error}.") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={given!r} is not valid. Allowed: a dictionary, such as {dict(example)}.")
    known = list(allowed)
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        raise ConfigError(f"{name} has {unknown!r}. Allowed: {', '.join(known)}.")
    return given


def check_seconds(name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is a number above 0, in the range of timeouts."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < threading.TIMEOUT_MAX:
        raise ConfigError(f"{name}={value!r} is not valid. Allowed: a number of seconds above 0.")


def is_positive_float32(value: Any) -> bool:
    """Whether `value` is a positive number that float32 holds: neither infinite, nor so small that it becomes 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and SMALLEST_FLOAT32 <= value <= LARGEST_FLOAT32


def check_flag(name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not valid. Allowed: True or False.")


def did_you_mean(name: str, known: Iterable[str], *, most: int = 3) -> str:
    """Sentence with up to `most` names that are close to this one, after a space; empty if there are none."""
    close = difflib.get_close_matches(name, dict.fromkeys(known), n=most)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def size_in_bytes(name: str, value: Any) -> int:
    """A size as a number of bytes: an integer, or a text such as "1GiB", "0.5 GiB", "2G" (2 GiB) or "2GB" (2 x 10^9).

    Raises ConfigError for anything else, and for less than one byte.
    """
    size = value
    match = _SIZE.fullmatch(value.strip().upper()) if isinstance(value, str) else None
    if match is not None and match[2] in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2]])
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(
            f"{name}={value!r} is not valid. Allowed: a number of bytes of at least 1, or a text such as '1GiB'."
        )
    return size
