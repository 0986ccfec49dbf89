"""Walk through a JSON schema that rewrites it to enforced keywords."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.structured.keywords import ANNOTATIONS, REFUSED, meant_instead_of
from penstock.structured.schema_references import References

MAX_DEPTH = 64
NEWEST_DRAFT = "draft/2020-12"
OLDEST_DRAFT = "draft-04"
# Drafts in which $ref overrides all keywords beside it.
OLD_DRAFTS = (OLDEST_DRAFT, "draft-06", "draft-07")
_DRAFTS = (*OLD_DRAFTS, "draft/2019-09", NEWEST_DRAFT)
# Keywords that apply subschemas to the same instance.
APPLIED_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "not", "if", "dependentSchemas")


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a keyword. schema: its schema; out: the rewritten schema so far; at: JSON pointer."""

    schema: dict[str, Any]
    out: dict[str, Any]
    name: str
    at: str
    depth: int


class Walk:
    """Walk of one schema. Unenforceable parts are collected in `refusals`, by JSON pointer.

    draft: declared by the schema; None if undeclared, when old forms have their old meaning.
    handlers: rewriting functions, by keyword.
    """

    def __init__(self, root: Any, handlers: Mapping[str, Handler]) -> None:
        self.refusals: list[tuple[str, str]] = []
        # Rewritten schemas by identity: the schema, its pointer, and the original.
        self.places: dict[int, tuple[Any, str, dict[str, Any]]] = {}
        # Nesting depth of `not`.
        self.num_negations = 0
        # Name patterns so far.
        self.num_patterns = 0
        self.references = References(root)
        self.handlers = handlers
        self._enforced = frozenset(handlers)
        self.draft = self._find_draft(root)

    def schema(self, schema: Any, at: str, depth: int) -> Any:
        """Rewrite a schema."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.refuse(at, f"a schema is a dictionary, true or false, not {shown(schema)}")
            return True
        if depth > MAX_DEPTH:
            self.refuse(at, f"schemas are nested more than {MAX_DEPTH} deep")
            return True
        out: dict[str, Any] = {}
        for name, value in schema.items():
            here = f"{at}/{escaped(name)}"
            if name in self.handlers:
                self.handlers[name](self, value, Place(schema, out, name, here, depth))
            else:
                self._check_other(name, value, schema, here)
        self.places[id(out)] = out, at, schema
        return out

    def definition(self, schema: Any, at: str) -> Any:
        """Rewrite the target of a reference."""
        return self.schema(schema, at, 0)

    def inner(self, value: Any, place: Place, *path: str | int) -> Any:
        """Rewrite the subschema of a keyword."""
        return self.schema(value, "/".join([place.at, *(escaped(str(part)) for part in path)]), place.depth + 1)

    def refuse(self, at: str, why: str) -> None:
        self.refusals.append((at, why))

    def _find_draft(self, root: Any) -> str | None:
        declared = root.get("$schema") if isinstance(root, dict) else None
        if declared is None:
            return None
        draft = _draft_of(declared)
        if draft is None:
            self.refuse("/$schema", f"{shown(declared)} is not known; known are {', '.join(_DRAFTS)}")
        return draft

    def _check_other(self, name: str, value: Any, schema: dict[str, Any], at: str) -> None:
        """Refuse a keyword that is not enforced, unless it is an annotation."""
        if name in REFUSED:
            if "if" in schema or name not in ("then", "else"):
                self.refuse(at, f"{name}: {REFUSED[name]}")
        elif name == "$schema":
            if self.draft not in (None, _draft_of(value)):
                self.refuse(at, f"a part of a schema is of the same draft as the whole, here {self.draft}")
        elif name not in ANNOTATIONS:
            meant = meant_instead_of(name, self._enforced)
            if meant is not None:
                self.refuse(at, f"{name!r} is not a keyword; did you mean {meant}? Names with x- may be anything")


Handler: TypeAlias = Callable[[Walk, Any, Place], None]


def is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def can_be_written(name: str) -> bool:
    r"""Whether a name can be written in JSON without \u escapes."""
    return all(char >= " " or char in "\b\f\n\r\t" for char in name)


def escaped(name: str) -> str:
    """Escape a token of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _draft_of(declared: Any) -> str | None:
    return next((draft for draft in _DRAFTS if isinstance(declared, str) and f"/{draft}/schema" in declared), None)


def unevaluated(walk: Walk, value: Any, place: Place, instead: str, *, also: str) -> None:
    """Rewrite an unevaluated* keyword as `instead`, which is equivalent without in-place applicators.

    also: another keyword that it cannot be combined with.
    """
    if value is True or value == {}:
        return
    others = [name for name in (*APPLIED_IN_PLACE, also) if name in place.schema]
    if others:
        walk.refuse(place.at, f"{place.name} together with {', '.join(others)}; use {instead}")
        return
    place.out[instead] = walk.inner(value, place)
