"""Checks of request parameters, with uniform error messages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from penstock.errors import InvalidParameter

# Levels of lists and dictionaries in plain data.
MAX_DEPTH = 100
# Digits of a number in text; no field of a request has more.
_MAX_DIGITS = 20
_LONGEST_SHOWN = 200


def shown(value: Any) -> str:
    """Format a value for an error message: shortened, without lone surrogates, never raising."""
    try:
        text = repr(value)
    except Exception:  # integers of too many digits, nesting that is too deep, a __repr__ that fails
        return f"<{type(value).__name__} that cannot be shown>"
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def invalid(name: str, value: Any, allowed: str) -> InvalidParameter:
    """Return the error for a value that is not allowed."""
    return InvalidParameter(f"{name}={shown(value)} is not valid. Allowed: {allowed}.")


def check_sendable(fields: Mapping[str, Any]) -> None:
    """Raise InvalidParameter, naming the field, for a value that cannot be serialised.

    Such values are text with lone surrogates, integers of more than 64 bits, and too deep nesting, at any level.
    """
    try:
        msgspec.msgpack.encode(fields)
    except (ValueError, OverflowError, TypeError, RecursionError):
        for name, value in fields.items():
            for path, part in _parts(name, value, MAX_DEPTH):
                try:
                    msgspec.msgpack.encode(part)
                except UnicodeEncodeError as error:
                    wrong = part[error.start : error.end]
                    raise InvalidParameter(
                        f"{path} has {wrong!r} at position {error.start}, which is not a character. "
                        "Allowed: text without lone surrogates."
                    ) from None
                except (ValueError, OverflowError, TypeError, RecursionError):
                    raise invalid(path, part, f"integers of 64 bits, nested {MAX_DEPTH} levels at most") from None
        raise


def _parts(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested value with their paths; a part deeper than `depth` stays whole."""
    if isinstance(value, msgspec.Struct):
        value = {f".{field}": getattr(value, field) for field in value.__struct_fields__}
        inner = [(f"{path}{field}", part) for field, part in value.items()]
    elif isinstance(value, Mapping):
        inner = [(path, key) for key in value] + [(f"{path}[{shown(key)}]", part) for key, part in value.items()]
    elif isinstance(value, (Sequence, frozenset, set)) and not isinstance(value, (str, bytes)):
        inner = [(f"{path}[{index}]", part) for index, part in enumerate(value)]
    else:
        yield path, value
        return
    if depth == 0:
        yield path, value
        return
    for inner_path, part in inner:
        yield from _parts(inner_path, part, depth - 1)


def check_number(name: str, value: Any, low: float, high: float, allowed: str, *, above: bool = False) -> None:
    """Raise InvalidParameter unless `value` is a finite number in low..high; `above` excludes `low` itself."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # An integer may be too large for `isfinite`; comparing it with a float is exact.
    is_finite = is_number and (isinstance(value, int) or math.isfinite(value))
    if not is_finite or value > high or value < low or (above and value == low):
        raise invalid(name, value, allowed)


def check_integer(name: str, value: Any, low: int, high: int | None, allowed: str) -> None:
    """Raise InvalidParameter unless `value` is an integer in low..high."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):
        raise invalid(name, value, allowed)


def check_num_kept(value: Any) -> None:
    """Raise InvalidParameter unless `value` is one of truncate_prompt_tokens."""
    if value is not None:
        allowed = "at least 1, -1 (as many as fit), or None"
        check_integer("truncate_prompt_tokens", value, -1, None, allowed)
        if value == 0:
            raise invalid("truncate_prompt_tokens", value, allowed)


def check_flag(name: str, value: Any) -> None:
    """Raise InvalidParameter unless `value` is True or False."""
    if not isinstance(value, bool):
        raise invalid(name, value, "True or False")


def check_member(name: str, value: Any, choices: type[Enum]) -> None:
    """Raise InvalidParameter unless `value` is one of the enum's."""
    if not isinstance(value, choices):
        raise invalid(name, value, ", ".join(map(str, choices)))


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Convert a list of token ids to a tuple, empty for None; raise InvalidParameter for anything else."""
    if value is None:
        return ()
    allowed = "a list of token ids, each 0 or more"
    if not isinstance(value, (tuple, list, frozenset, set)):
        raise invalid(name, value, allowed)
    # Without a loop of Python's: a vocabulary has hundreds of thousands.
    kinds = set(map(type, value))
    if any(not issubclass(kind, int) or kind is bool for kind in kinds) or (kinds and min(value) < 0):
        raise invalid(name, value, allowed)
    return tuple(value)


def token_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Convert a list of non-empty lists of token ids to tuples; raise InvalidParameter for anything else."""
    if value is None:
        return ()
    if not isinstance(value, (tuple, list)):
        raise invalid(name, value, "a list of lists of token ids")
    sequences = tuple(token_ids(name, sequence) for sequence in value)
    if not all(sequences):
        raise invalid(name, value, "a list of lists of token ids, none of them empty")
    return sequences


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Convert a text or a list of texts to a tuple; raise InvalidParameter for anything else, or an empty text."""
    if value is None:
        return ()
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, (tuple, list)) or not all(isinstance(text, str) and text for text in listed):
        raise invalid(name, value, "a text or a list of texts, none of them empty")
    return tuple(listed)


def biases(name: str, value: Any, limit: float) -> dict[int, float] | None:
    """Convert a mapping from token ids to logit biases; ids may be text, as in JSON."""
    if value is None:
        return None
    allowed = f"token ids, each 0 or more, with numbers from {-limit:g} to {limit:g}"
    if not isinstance(value, Mapping):
        raise invalid(name, value, allowed)
    result = {}
    for key, bias in value.items():
        is_id = type(key) is int and key >= 0
        is_text_of_id = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS
        if not is_id and not is_text_of_id:
            raise invalid(name, value, allowed)
        check_number(f"{name}[{key if is_text_of_id else shown(key)}]", bias, -limit, limit, allowed)
        result[int(key)] = float(bias)
    return result


def plain_data(name: str, value: Any) -> dict[str, Any] | None:
    """Return a dictionary of JSON-like data; raise InvalidParameter for anything else."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise invalid(name, value, "a dictionary from a logits processor's name to its arguments")
    if not _is_plain(value, MAX_DEPTH):
        allowed = "numbers, texts, True, False, None, and lists and dictionaries of these"
        raise invalid(name, value, f"{allowed}, nested {MAX_DEPTH} levels at most")
    return dict(value)


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, Mapping):
        return depth > 0 and all(
            isinstance(key, (str, int)) and _is_plain(item, depth - 1) for key, item in value.items()
        )
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
