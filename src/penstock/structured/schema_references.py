"""References of a schema, rewritten to numbered definitions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from penstock.structured.finite import endless

_IDS = ("$id", "id")
_ANCHORS = ("$anchor", "$dynamicAnchor")
# Keywords with schemas by name; other keywords have schemas or data.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_INDEX = re.compile("[0-9]{1,9}")
_MAX_OPEN = 16
_DATA = ("const", "enum", "default", "examples", "example")


class References:
    """References within one document: JSON pointers, anchors, and the document's own $id."""

    def __init__(self, root: Any) -> None:
        self.root = root if isinstance(root, dict) else {}
        self._definitions: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        self._num_open = 0
        self._put_off: list[str] = []
        self._circular: dict[str, bool] = {}
        self._anchors: dict[str, str] = {}
        self._inner_address: str | None = None
        address = next((self.root[name] for name in _IDS if isinstance(self.root.get(name), str)), "")
        self._address = address.partition("#")[0]
        self._collect(self.root, "")

    def resolve(self, reference: Any) -> tuple[str | None, str]:
        """Resolve a reference to a JSON pointer; or None and the reason."""
        if not isinstance(reference, str):
            return None, f"{reference!r} is not a reference"
        address, _, fragment = reference.partition("#")
        if address and address != self._address:
            return None, f"{reference!r} is in another document; put it under $defs"
        if self._inner_address is not None:
            return None, f"references in a schema of which a part has its own address ({self._inner_address!r})"
        if fragment and not fragment.startswith("/"):
            if fragment not in self._anchors:
                return None, f"{reference!r} leads nowhere"
            return self._anchors[fragment], ""
        pointer = unquote(fragment)
        return (pointer, "") if self._find(pointer) is not None else (None, f"{reference!r} leads nowhere")

    def target(self, pointer: str) -> Any:
        """Schema at a pointer that `resolve` returned."""
        return self._find(pointer)

    def define(self, pointer: str, walk: Callable[[Any, str], Any]) -> str:
        """Return a reference to the definition of the schema at a pointer, which is walked at its first use.

        Long chains of definitions are deferred to `finish`, to bound the depth of the stack. walk: called with the
        schema and its pointer.
        """
        if pointer not in self._names:
            self._names[pointer] = f"d{len(self._names)}"
            if self._num_open < _MAX_OPEN:
                self._num_open += 1
                self._definitions[self._names[pointer]] = walk(self._find(pointer), pointer)
                self._num_open -= 1
            else:
                self._put_off.append(pointer)
        return f"#/$defs/{self._names[pointer]}"

    def finish(self, walk: Callable[[Any, str], Any]) -> None:
        """Walk the deferred definitions."""
        while self._put_off:
            pointer = self._put_off.pop()
            self._definitions[self._names[pointer]] = walk(self._find(pointer), pointer)

    def is_circular(self, pointer: str) -> bool:
        """Whether a schema refers to itself on the same instance, or to a schema that does, through references and
        combinations alone.
        """
        # Depth-first search without recursion, since chains may be long. An open node that is met again closes a cycle.
        open_pointers: dict[str, Iterator[str]] = {}
        if pointer not in self._circular:
            open_pointers[pointer] = iter(self._applied_by(pointer))
        while open_pointers:
            last = next(reversed(open_pointers))
            following = next(open_pointers[last], None)
            if following is None:
                del open_pointers[last]
                self._circular.setdefault(last, False)
            elif following in open_pointers or self._circular.get(following):
                self._circular.update(dict.fromkeys(open_pointers, True))
                break
            elif following not in self._circular:
                open_pointers[following] = iter(self._applied_by(following))
        return self._circular[pointer]

    def rewritten(self, reference: str) -> Any:
        """Definition that a reference of a rewritten schema leads to; None if it is still being walked."""
        return self._definitions.get(reference.rpartition("/")[2])

    def endless(self) -> list[str]:
        """JSON pointers of the definitions without a finite instance."""
        names = set(endless(self._definitions))
        return [pointer for pointer, name in self._names.items() if name in names]

    def with_definitions(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema together with the definitions that it refers to."""
        return {"$defs": self._definitions, **schema} if self._definitions else schema

    def _applied_by(self, pointer: str) -> list[str]:
        """Targets of a schema's references on the same instance."""
        found, left = [], [self._find(pointer)]
        while left:
            schema = left.pop()
            if isinstance(schema, dict):
                if "$ref" in schema and (target := self.resolve(schema["$ref"])[0]) is not None:
                    found.append(target)
                left += [branch for name in ("allOf", "anyOf", "oneOf") for branch in _listed(schema.get(name))]
                left += [schema.get(name) for name in ("not", "if", "then", "else")]
                dependent = (schema.get(name) for name in ("dependentSchemas", "dependencies"))
                left += [branch for named in dependent if isinstance(named, dict) for branch in named.values()]
        return found

    def _find(self, pointer: str) -> Any:
        found: Any = self.root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and _INDEX.fullmatch(key) and int(key) < len(found):
                found = found[int(key)]
            else:
                return None
        return found if isinstance(found, (dict, bool)) else None

    def _collect(self, node: Any, at: str, *, is_schema: bool = True, depth: int = 0) -> None:
        """Collect anchors, and subschemas with an $id."""
        if depth > 200:
            return
        if isinstance(node, list):
            for index, item in enumerate(node):
                self._collect(item, f"{at}/{index}", depth=depth + 1)
        if not isinstance(node, dict):
            return
        if is_schema:
            self._collect_names(node, at)
        for name, value in node.items():
            if not is_schema or name not in _DATA:
                here = f"{at}/{name.replace('~', '~0').replace('/', '~1')}"
                self._collect(value, here, is_schema=not is_schema or name not in _BY_NAME, depth=depth + 1)

    def _collect_names(self, node: dict[str, Any], at: str) -> None:
        for name in _ANCHORS:
            if isinstance(node.get(name), str):
                self._anchors[node[name]] = at
        for name in _IDS:
            value = node.get(name)
            if not isinstance(value, str):
                continue
            address, _, fragment = value.partition("#")
            if fragment and not fragment.startswith("/"):
                self._anchors[fragment] = at
            if at and address and self._inner_address is None:
                self._inner_address = value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
