"""The checks that request parameters share, each with the house's kind of message."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

from penstock.errors import InvalidParameter


def invalid(name: str, value: Any, allowed: str) -> InvalidParameter:
    """The error for a value that is not allowed."""
    return InvalidParameter(f"{name}={value!r} is not valid. Allowed: {allowed}.")


def check_number(name: str, value: Any, low: float, high: float, allowed: str, *, above: bool = False) -> None:
    """Raise InvalidParameter unless `value` is a finite number in low..high; `above` excludes `low` itself."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value > high or value < low or (above and value == low):
        raise invalid(name, value, allowed)


def check_integer(name: str, value: Any, low: int, high: int | None, allowed: str) -> None:
    """Raise InvalidParameter unless `value` is an integer in low..high."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):
        raise invalid(name, value, allowed)


def check_flag(name: str, value: Any) -> None:
    """Raise InvalidParameter unless `value` is True or False."""
    if not isinstance(value, bool):
        raise invalid(name, value, "True or False")


def check_member(name: str, value: Any, choices: type[Enum]) -> None:
    """Raise InvalidParameter unless `value` is one of the enum's."""
    if not isinstance(value, choices):
        raise invalid(name, value, ", ".join(map(str, choices)))


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids as a tuple; raises InvalidParameter for anything else."""
    allowed = "a list of token ids, each 0 or more"
    if not isinstance(value, (tuple, list, frozenset, set)):
        raise invalid(name, value, allowed)
    for token_id in value:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise invalid(name, value, allowed)
    return tuple(value)


def token_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """A list of non-empty lists of token ids as tuples; raises InvalidParameter for anything else."""
    if not isinstance(value, (tuple, list)):
        raise invalid(name, value, "a list of lists of token ids")
    sequences = tuple(token_ids(name, sequence) for sequence in value)
    if not all(sequences):
        raise invalid(name, value, "a list of lists of token ids, none of them empty")
    return sequences


def texts(name: str, value: Any) -> tuple[str, ...]:
    """A text or a list of them as a tuple; raises InvalidParameter for anything else, an empty text included."""
    if value is None:
        return ()
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, (tuple, list)) or not all(isinstance(text, str) and text for text in listed):
        raise invalid(name, value, "a text or a list of texts, none of them empty")
    return tuple(listed)


def biases(name: str, value: Any, limit: float) -> dict[int, float] | None:
    """Token ids with what is added to their logits; ids may be written as text, as JSON has no other keys."""
    if value is None:
        return None
    allowed = f"token ids, each 0 or more, with numbers from {-limit:g} to {limit:g}"
    if not isinstance(value, Mapping):
        raise invalid(name, value, allowed)
    result = {}
    for key, bias in value.items():
        is_id = type(key) is int and key >= 0
        if not is_id and not (isinstance(key, str) and key.isascii() and key.isdecimal()):
            raise invalid(name, value, allowed)
        check_number(f"{name}[{key}]", bias, -limit, limit, allowed)
        result[int(key)] = float(bias)
    return result


def plain_data(name: str, value: Any) -> dict[str, Any] | None:
    """A dictionary of what JSON can say, by name: it must survive being sent to a worker."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise invalid(name, value, "a dictionary from a logits processor's name to what it is given")
    if not _is_plain(dict(value)):
        raise invalid(name, value, "numbers, texts, True, False, None, and lists and dictionaries of these")
    return dict(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, (str, int)) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
