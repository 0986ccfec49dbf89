"""Walk through a JSON schema that rewrites it to enforced keywords."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.structured.keywords import ANNOTATIONS, FOREIGN, UNENFORCED, meant_instead_of
from penstock.structured.schema_references import References

MAX_DEPTH = 64
NEWEST_DRAFT = "draft/2020-12"
OLDEST_DRAFT = "draft-04"
# Drafts in which $ref overrides all keywords beside it.
OLD_DRAFTS = (OLDEST_DRAFT, "draft-06", "draft-07")
_DRAFTS = (*OLD_DRAFTS, "draft/2019-09", NEWEST_DRAFT)
# Keywords that apply subschemas to the same instance.
APPLIED_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "not", "if", "dependentSchemas", "dependencies")


TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
# Cases of conditions that an instance is looked at in.
MAX_CASES = 64
# Ends of the pointers of keywords for the same instance.
_IN_PLACE = re.compile(
    r"(/(allOf|anyOf|oneOf)/[0-9]+|/(if|then|else|not)|/(dependentSchemas|dependencies|dependentRequired)(/[^/]*)?)+$"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a keyword. schema: its schema; out: the rewritten schema so far; at: JSON pointer."""

    schema: dict[str, Any]
    out: dict[str, Any]
    name: str
    at: str
    depth: int


class Walk:
    """Walk of one schema. What keeps it from being enforced is collected in `refusals`, by JSON pointer.

    A rewritten schema allows no instance that is invalid for the original, and may allow fewer (`format` is enforced,
    say). With `is_wide` it is the other way round: it allows all that are valid, and perhaps more, so that its
    complement allows none of them.

    draft: declared by the schema; None if undeclared, when old forms have their old meaning.
    handlers: rewriting functions, by keyword. drops: valid keywords that cannot be enforced are left out.
    """

    def __init__(self, root: Any, handlers: Mapping[str, Handler], *, drops: bool = False) -> None:
        self.refusals: list[tuple[str, str]] = []
        # Those of valid keywords.
        self.could_drop: list[tuple[str, str]] = []
        # What is said of annotations that may have been meant as more, by JSON pointer.
        self.warnings: dict[str, str] = {}
        self.is_wide = False
        # Targets of references that are being copied, and the number of all copies.
        self.copying: set[str] = set()
        self.num_copies = 0
        self._num_cases: dict[str, int] = {}
        self._drops = drops
        # Rewritten schemas by identity: the schema, its pointer, and the original.
        self.places: dict[int, tuple[Any, str, dict[str, Any]]] = {}
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
        # Old drafts pass over what is beside a $ref.
        only_ref = self.is_wide and self.draft in OLD_DRAFTS and "$ref" in schema
        for name, value in schema.items():
            here = f"{at}/{escaped(name)}"
            if only_ref and name != "$ref":
                continue
            if name in self.handlers:
                self.handlers[name](self, value, Place(schema, out, name, here, depth))
            else:
                self._check_other(name, value, here)
        self.places[id(out)] = out, at, schema
        return out

    def definition(self, schema: Any, at: str) -> Any:
        """Rewrite the target of a reference."""
        return self.schema(schema, at, 0)

    def inner(self, value: Any, place: Place, *path: str | int) -> Any:
        """Rewrite the subschema of a keyword."""
        return self.schema(value, "/".join([place.at, *(escaped(str(part)) for part in path)]), place.depth + 1)

    def wide(self, value: Any, place: Place, *path: str | int) -> Any:
        """Rewrite the subschema of a keyword to one that allows all its valid instances."""
        before, self.is_wide = self.is_wide, True
        try:
            return self.inner(value, place, *path)
        finally:
            self.is_wide = before

    def refuse(self, at: str, why: str) -> None:
        """Refuse what is not valid as a schema, or too large."""
        self.refusals.append((at, why))

    def cannot(self, at: str, why: str) -> None:
        """Note a valid keyword that cannot be enforced, and which the caller leaves out."""
        if not self.is_wide:
            self.could_drop.append((at, why))
            if not self._drops:
                self.refusals.append((at, why))

    def may_branch(self, place: Place, num_cases: int) -> bool:
        """Whether an instance may be looked at in so many cases, with those of other keywords; noted otherwise."""
        instance = _IN_PLACE.sub("", place.at)
        product = self._num_cases[instance] = self._num_cases.get(instance, 1) * num_cases
        if product > MAX_CASES:
            self.cannot(place.at, f"{place.name}: conditions of one instance make more than {MAX_CASES} cases together")
        return product <= MAX_CASES

    def warn(self, at: str, why: str) -> None:
        self.warnings.setdefault(at, why)

    def _find_draft(self, root: Any) -> str | None:
        declared = root.get("$schema") if isinstance(root, dict) else None
        if declared is None:
            return None
        draft = _draft_of(declared)
        if draft is None:
            self.refuse("/$schema", f"{shown(declared)} is not known; known are {', '.join(_DRAFTS)}")
        return draft

    def _check_other(self, name: str, value: Any, at: str) -> None:
        """Check a keyword that is not enforced: it is an annotation, or one that must be."""
        if name in UNENFORCED:
            self.cannot(at, f"{name}: {UNENFORCED[name]}")
        elif name == "$schema":
            if self.draft not in (None, _draft_of(value)):
                self.refuse(at, f"a part of a schema is of the same draft as the whole, here {self.draft}")
        elif name in FOREIGN:
            self.warn(at, FOREIGN[name])
        elif name not in ANNOTATIONS:
            meant = meant_instead_of(name, self._enforced)
            if meant is not None:
                self.warn(at, f"{name!r} is not a keyword; did you mean {meant}?")


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
        walk.cannot(place.at, f"{place.name} together with {', '.join(others)}; use {instead}")
        return
    place.out[instead] = walk.inner(value, place)
