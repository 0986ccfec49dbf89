"""Detection of definitions without finite instances, since each would contain another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from penstock.structured.derivations import productive

_CONTAINERS = {"object", "array"}
# Definitions by name, and their parts by number.
_Part: TypeAlias = str | int


def endless(definitions: Mapping[str, Any]) -> list[str]:
    """Names of the definitions without a finite instance. definitions: as rewritten by the walk."""
    parts = _Parts()
    for name, schema in definitions.items():
        parts.alternatives.append((name, [parts.schema(schema)]))
    finite = productive(parts.alternatives)
    return [name for name in definitions if name not in finite]


class _Parts:
    """Parts of schemas, each with its alternatives: the parts that must have finite instances for it to have one."""

    def __init__(self) -> None:
        self.alternatives: list[tuple[_Part, list[_Part]]] = []
        self._num_parts = 0

    def schema(self, schema: Any) -> int:
        """Return the part of a schema."""
        if not isinstance(schema, dict):
            return self._any_of([]) if schema is False else self._all_of([])
        needed: list[_Part] = [self.schema(branch) for branch in schema.get("allOf", ())]
        if "$ref" in schema:
            needed.append(schema["$ref"].rpartition("/")[2])
        if "anyOf" in schema:
            needed.append(self._any_of(self.schema(branch) for branch in schema["anyOf"]))
        types = schema.get("type")
        listed = {types} if isinstance(types, str) else set(types or ())
        if "const" not in schema and "enum" not in schema and listed and not listed - _CONTAINERS:
            containers = {"object": self._object, "array": self._array}
            needed.append(self._any_of(containers[name](schema) for name in listed))
        return self._all_of(needed)

    def _object(self, schema: dict[str, Any]) -> int:
        properties = schema.get("properties", {})
        return self._all_of([self.schema(properties.get(name, True)) for name in schema.get("required", ())])

    def _array(self, schema: dict[str, Any]) -> int:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        num_needed = schema.get("minItems", 0)
        needed = [*first[:num_needed], *([rest] if num_needed > len(first) else [])]
        return self._all_of([self.schema(item) for item in needed])

    def _all_of(self, needed: list[_Part]) -> int:
        part = self._new()
        self.alternatives.append((part, needed))
        return part

    def _any_of(self, branches: Iterable[int]) -> int:
        part = self._new()
        self.alternatives.extend((part, [branch]) for branch in branches)
        return part

    def _new(self) -> int:
        self._num_parts += 1
        return self._num_parts
