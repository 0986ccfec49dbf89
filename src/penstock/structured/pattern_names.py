"""Removal of patternProperties that match no further name: listed names only, or characters that JSON must escape.

llguidance removes listed names from the patterns that match them, and does not notice if no name remains: then nothing
could follow a comma.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.structured.schema_parts import parts_of, with_parts

# Parts of translated patterns that match any number of texts.
_UNBOUNDED = re.compile(r"[*+]|\{\d+,\}")
_CONTROL = re.compile(r"\\x\{(?:1?[0-9a-f]|7f)\}")
_NOT_A_STRING = {"type": ["null", "boolean", "number", "array", "object"]}
_QUOTE, _BRACE, _BACKSLASH = b'"{\\'
_NUM_BYTES = 256
# Characters may be escaped in JSON.
_BYTES_PER_BYTE = 2


def without_empty_patterns(schema: dict[str, Any], allowed_escapes: str) -> dict[str, Any]:
    """Return an equivalent schema in which each pattern matches further names.

    A pattern that matches listed names only becomes those properties; one that matches nothing is removed.
    schema: as `enforceable` returns it. allowed_escapes: characters that may follow a backslash in a string.
    """
    names = {name for part in parts_of(schema) for name in (*part.get("properties", ()), *part.get("required", ()))}
    if not any(part.keys() & {"pattern", "patternProperties"} for part in parts_of(schema)):
        return schema
    whole: dict[str, Any] = _Settling(names, allowed_escapes).schema(schema)
    return whole


class _Settling:
    """Rewriting of one schema. names: names of all its properties."""

    def __init__(self, names: Collection[str], allowed_escapes: str) -> None:
        self._names = names
        self._probe = _Probe(allowed_escapes, max((len(name.encode()) for name in names), default=0))

    def schema(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        out = with_parts(schema, self.schema)
        for pattern, item in out.pop("patternProperties", {}).items():
            may_be_empty = _CONTROL.search(pattern) is not None
            is_finite = "^" in pattern and "$" in pattern and not _UNBOUNDED.search(pattern)
            found = self._listed({"patternProperties": {pattern: {}}}) if may_be_empty or is_finite else None
            if found is None:
                out.setdefault("patternProperties", {})[pattern] = item
            else:
                _add_properties(out, found, item)
        patterns = out.get("patternProperties", {})
        rest = out.get("additionalProperties", True)
        if rest is not False and False in patterns.values():
            found = self._listed({"patternProperties": dict.fromkeys(patterns, False), "additionalProperties": {}})
            if found is not None:
                _add_properties(out, found, rest)
                out["additionalProperties"] = False
        pattern = out.get("pattern", "")
        if _CONTROL.search(pattern) and self._listed({"patternProperties": {pattern: {}}}) == []:
            del out["pattern"]
            out["allOf"] = [*out.get("allOf", []), _NOT_A_STRING]
        return out

    def _listed(self, of_names: dict[str, Any]) -> list[str] | None:
        """Names that the properties of a schema may have, if all are listed; None for refused patterns."""
        try:
            word = self._probe.word(of_names)
            if word is None:
                return []
            if word not in self._names or self._probe.word(of_names, excluded=self._names) is not None:
                return None
            return self._probe.matching(of_names, self._names)
        except _NotEnforced:
            return None


class _NotEnforced(ValueError):
    """Schema that llguidance refuses; compiling the constraint raises the error."""


class _Probe:
    """Probe of the property names that llguidance allows. longest: length of the longest probed name, in bytes."""

    def __init__(self, allowed_escapes: str, longest: int) -> None:
        self._tokenizer = LLTokenizer("byte")
        self._options = {"json_allowed_escapes": allowed_escapes, "whitespace_flexible": False}
        self._longest = longest
        self._words = np.zeros((self._tokenizer.vocab_size + 31) // 32, np.int32)

    def word(self, of_names: dict[str, Any], excluded: Collection[str] = ()) -> str | None:
        """Return a name that the object may have, cut off at the longest probed length; None if it has none."""
        matcher = self._matcher({**of_names, "properties": dict.fromkeys(excluded, False)})
        written: list[int] = []
        is_escaped = False
        while len(written) <= _BYTES_PER_BYTE * self._longest + 2:
            allowed = self._allowed(matcher)
            if not allowed:
                break
            may_close = len(written) > 0 and not is_escaped and _QUOTE in allowed
            token = _QUOTE if may_close else min(allowed, key=lambda byte: (byte == _BACKSLASH, byte))
            matcher.try_consume_tokens([token])
            written.append(token)
            if may_close:
                name: str = json.loads(bytes(written))
                return name
            is_escaped = token == _BACKSLASH and not is_escaped
        return bytes(written[1:]).decode(errors="replace") if written else None

    def matching(self, of_names: dict[str, Any], names: Collection[str]) -> list[str]:
        """Return the names of a list that the object may have."""
        matcher, found = self._matcher(of_names), []
        for name in names:
            token_ids = list(json.dumps(name, ensure_ascii=False).encode())
            num_accepted = matcher.try_consume_tokens(token_ids)
            matcher.rollback(num_accepted)
            if num_accepted == len(token_ids):
                found.append(name)
        return found

    def _matcher(self, of_names: dict[str, Any]) -> LLMatcher:
        """Matcher after the opening brace of an object. Raises _NotEnforced."""
        schema = {"additionalProperties": False, **of_names, "type": "object", "minProperties": 1}
        source = f"start: %json {json.dumps({**schema, 'x-guidance': self._options})}"
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error() or matcher.try_consume_tokens([_BRACE]) != 1:
            raise _NotEnforced
        return matcher

    def _allowed(self, matcher: LLMatcher) -> list[int]:
        """Allowed next bytes."""
        matcher.unsafe_compute_mask_ptr(self._words.__array_interface__["data"][0], self._words.nbytes)
        if matcher.is_error():
            return []
        bits = np.unpackbits(self._words.view(np.uint8), count=_NUM_BYTES, bitorder="little")
        allowed: list[int] = np.flatnonzero(bits).tolist()
        return allowed


def _add_properties(out: dict[str, Any], names: Iterable[str], item: Any) -> None:
    """Add a schema to properties."""
    for name in names:
        properties = out.setdefault("properties", {})
        properties[name] = {"allOf": [properties[name], item]} if name in properties else item
