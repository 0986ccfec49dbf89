"""Schemas of what is invalid for a schema."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from penstock.structured.patterns import literal
from penstock.structured.schema_constants import type_of

_TYPES = ("null", "boolean", "number", "string", "array", "object")
# By keyword: its type, and the schema of the instances of that type that violate it.
_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
# Any text, without an end of its own.
ANY_TEXT = "(?s:.)*"
# Characters by which texts are told apart, since patterns nest only so deep, and of all texts together.
_MAX_COMPARED = 64
_MAX_CHARACTERS = 4000


def negated(schema: Any, *, is_complete: bool = False) -> Any:
    """Return a schema of instances that are all invalid for this one: those that are known, or all with is_complete.

    schema: rewritten by the walk with `is_wide`. None if no invalid instance is known, or not all are.
    """
    if isinstance(schema, bool):
        return not schema
    branches = [_of_keyword(name, value, schema, is_complete) for name, value in schema.items()]
    return None if is_complete and None in branches else _any_of(branches)


def negated_for_types(schema: Any, shared: set[str], alone: set[str]) -> Any:
    """As `negated`, of a schema that is known to hold for no instance of some types.

    shared: the types of other instances. alone: types for which the schema never holds.
    """
    outside = negated(schema)
    kept = [branch for branch in _alternatives(outside) if _may_be_of(branch, shared)]
    if alone:
        kept.append({"type": sorted(alone)})
    is_known = kept or negated(schema, is_complete=True) is not None
    return _any_of(kept) if is_known else None


def _may_be_of(schema: Any, wanted: set[str]) -> bool:
    types = schema.get("type") if isinstance(schema, dict) else None
    return types is None or not wanted.isdisjoint([types] if isinstance(types, str) else types)


def _alternatives(schema: Any) -> list[Any]:
    """Branches of a schema that is an anyOf; else the schema."""
    return list(schema["anyOf"]) if isinstance(schema, dict) and schema.keys() == {"anyOf"} else [schema]


def _of_keyword(name: str, value: Any, schema: dict[str, Any], is_complete: bool) -> Any:
    """Schema of instances that violate a keyword. schema: the keyword's, whose prefixItems come before its items."""
    union = _any_of_all if is_complete else _any_of

    def outside(inner: Any) -> Any:
        return negated(inner, is_complete=is_complete)

    if name == "type":
        return _not_of_types(value)
    if name in ("const", "enum"):
        return _not_of_constants([value] if name == "const" else value)
    if name in _BOUNDS:
        return _not_of_bound(name, value)
    if name == "minProperties":
        return {"type": "object", "maxProperties": 0}
    if name == "maxProperties":
        return {"type": "object", "minProperties": 1} if value == 0 else None
    if name == "required":
        return _any_of([{"type": "object", "properties": {missing: False}} for missing in value])
    if name == "properties":
        return union([_with_property(key, outside(item)) for key, item in value.items()])
    if name == "prefixItems":
        return union([_with_item(index, outside(item)) for index, item in enumerate(value)])
    if name == "items":
        # Any other item may be the one, too.
        return None if is_complete else _with_item(len(schema.get("prefixItems", ())), outside(value))
    if name == "allOf":
        return union([outside(branch) for branch in value])
    if name == "anyOf":
        return _all_of([outside(branch) for branch in value])
    return None


def _any_of_all(branches: Sequence[Any]) -> Any:
    """Union of branches; None if one of them is not known."""
    return None if None in branches else _any_of(branches)


def _any_of(branches: Sequence[Any]) -> Any:
    """Union of the known branches; None if none is known."""
    known = [one for branch in branches if branch is not None for one in _alternatives(branch) if one is not False]
    if True in known:
        return True
    if known:
        return {"anyOf": known} if len(known) > 1 else known[0]
    return None if None in branches else False


def _all_of(branches: Sequence[Any]) -> Any:
    if None in branches:
        return None
    return False if False in branches else {"allOf": [branch for branch in branches if branch is not True]}


def _not_of_types(types: str | list[str]) -> Any:
    unwanted = {types} if isinstance(types, str) else set(types)
    # Types cannot tell a number that is not an integer.
    if "integer" in unwanted:
        unwanted.add("number")
    rest = [name for name in _TYPES if name not in unwanted]
    if rest:
        return {"type": rest}
    return None if "integer" in unwanted else False


def _not_of_constants(values: list[Any]) -> Any:
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(type_of(value), []).append(value)
    rest = [name for name in _TYPES if name not in by_type]
    branches: list[Any] = [{"type": rest}] if rest else []
    branches += [{"const": flag} for flag in (True, False) if flag not in by_type.get("boolean", (True, False))]
    if "number" in by_type:
        branches += _between(sorted(set(by_type["number"])))
    if "string" in by_type and (others := _other_texts(by_type["string"])) is not None:
        branches.append({"type": "string", "pattern": others})
    return _any_of(branches) if branches else None


def _between(numbers: Sequence[float]) -> list[Any]:
    """Intervals of the numbers that are not among these."""
    bounds = [None, *numbers, None]
    intervals = []
    for low, high in itertools.pairwise(bounds):
        limits = {} if low is None else {"exclusiveMinimum": low}
        intervals.append({"type": "number", **limits, **({} if high is None else {"exclusiveMaximum": high})})
    return intervals


def _other_texts(texts: Sequence[str]) -> str | None:
    """Pattern of the texts that are not among these, nor begin as long ones do; None if these are too long together."""
    if sum(map(len, texts)) > _MAX_CHARACTERS:
        return None
    # A trie, in which None is the end of a text.
    trie: dict[str | None, Any] = {}
    for text in texts:
        node = trie
        for char in text[:_MAX_COMPARED]:
            node = node.setdefault(char, {})
        node[None] = node.get(None, False) or len(text) > _MAX_COMPARED
    return f"^{_outside(trie)}$"


def _outside(node: dict[str | None, Any]) -> str:
    """Pattern of what may follow at this node of a text. Nothing may follow the beginning of a long one."""
    children = {literal(ord(char)): child for char, child in node.items() if char is not None}
    other = f"[^{''.join(children)}]{ANY_TEXT}" if children else f"(?s:.){ANY_TEXT}"
    branches = [char + _outside(child) for char, child in children.items() if not child.get(None)]
    alternatives = "|".join([other, *branches])
    return f"(?:{alternatives})" if None in node else f"(?:{alternatives})?"


def _not_of_bound(name: str, value: float) -> Any:
    kind, opposite, step = _BOUNDS[name]
    if value + step < 0 and step:
        return False
    return {"type": kind, opposite: value + step}


def _with_property(name: str, schema: Any) -> Any:
    if schema is None or schema is False:
        return schema
    return {"type": "object", "required": [name], "properties": {name: schema}}


def _with_item(index: int, schema: Any) -> Any:
    """Arrays of which one item follows a schema, by its index."""
    if schema is None or schema is False:
        return schema
    return {"type": "array", "minItems": index + 1, "prefixItems": [*[True] * index, schema]}
