"""Upper limits of the sizes in a model's `config.json`, far above those of any model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.checkpoints.json_file import clipped, shown
from penstock.errors import ModelError

# Tokens of a context; the longest known has a tenth.
MAX_POSITIONS = 2**27
# Limits by the end of a field's name: numbers of modules, and dimensions of matrices.
_LIMITS = (
    (re.compile(r"(^|_)(layers?|blocks?)$"), 2_000),
    (re.compile(r"(^|_)experts$"), 10_000),
    (re.compile(r"(^|_)(size|dim|heads?|embd|inner|rank)$|^d_"), 2**24),
)


def check_sizes(hf_config: Mapping[str, Any], source: str) -> None:
    """Raise ModelError for a size above the limits, in nested configurations too. source: its name in messages."""
    for field, value, limit in _sizes(hf_config):
        if value > limit:
            raise ModelError(
                f"{source} has {field}={shown(value)}. It must be at most {limit:,}, which is more than any model has."
            )


def positive_integer(fields: Mapping[str, Any], name: str, source: str, prefix: str = "") -> int:
    """A field that must be a positive integer of at most `MAX_POSITIONS`. source, prefix: of its name in messages.

    Raises ModelError when it is missing or something else.
    """
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{source} has {prefix}{name}={shown(value)}. It must be a positive integer.")
    if value > MAX_POSITIONS:
        raise ModelError(f"{source} has {prefix}{name}={shown(value)}. It must be at most {MAX_POSITIONS:,}.")
    return value


def describe_sizes(hf_config: Mapping[str, Any]) -> str:
    """The sizes of a model for a message, such as "hidden_size=192, vocab_size=1536"."""
    return clipped(", ".join(f"{field}={value}" for field, value, _ in _sizes(hf_config)))


def _sizes(hf_config: Mapping[str, Any]) -> Iterator[tuple[str, float, int]]:
    """Yield the fields that are sizes, with their values and limits."""
    waiting: list[tuple[Mapping[str, Any], str]] = [(hf_config, "")]
    while waiting:
        fields, prefix = waiting.pop()
        for name, value in fields.items():
            if isinstance(value, Mapping):
                waiting.append((value, f"{prefix}{name}."))
            elif type(value) in (int, float):
                limit = next((limit for ending, limit in _LIMITS if ending.search(str(name))), None)
                if limit is not None:
                    yield clipped(f"{prefix}{name}"), value, limit
