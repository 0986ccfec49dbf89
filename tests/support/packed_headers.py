"""Headers of packed states as JSON, and every way in which one field of theirs can be wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from penstock.loader.packed_header import HEADER

# Of each JSON type one that no field's value has.
_OF_TYPES: dict[type, Any] = {
    type(None): None,
    bool: True,
    int: 987654321987654321,
    float: 0.5,
    str: "another type",
    list: [[]],
    dict: {"another": {}},
}
REMOVED = object()
# A place in a header: keys and indices.
Place = tuple[str | int, ...]


def content_of(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[HEADER])
    return header, {name: tensor.clone() for name, tensor in load_file(path).items()}


def places_in(value: Any, place: Place = ()) -> Iterator[Place]:
    """Places of all fields, and of those within them."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield (*place, key)
        yield from places_in(one, (*place, key))


def other_values(value: Any) -> list[Any]:
    """`REMOVED`, and values of other types than this one's; a text may be absent."""
    return [REMOVED, *(other for kind, other in _OF_TYPES.items() if kind is not type(value))]


def at(header: Any, place: Place) -> Any:
    for key in place:
        header = header[key]
    return header


def changed(header: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    """A copy of a header with another value in a place."""
    copy: dict[str, Any] = json.loads(json.dumps(header))
    *before, last = place
    owner = at(copy, tuple(before))
    if value is REMOVED:
        del owner[last]
    else:
        owner[last] = value
    return copy
