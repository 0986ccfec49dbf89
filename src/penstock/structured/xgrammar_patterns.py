"""Regular expressions in xgrammar's notation of grammars, from the form that `patterns` writes.

xgrammar's own regular expressions are not used: they read some things as something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from penstock.structured.patterns import PatternError

_TOKEN = re.compile(
    r"(?P<literal>\\x\{[0-9a-f]+\}|[0-9A-Za-z])|(?P<brackets>\[[^\[\]]*\])"
    r"|(?P<quantifier>[*+?]|\{\d+(?:,\d*)?\})|(?P<group>\(\?:|[()])|(?P<bar>\|)|(?P<anchor>[\^$])"
)
_MEMBER = re.compile(r"\\x\{([0-9a-f]+)\}|\\([trn])|([^\\-])")
_LARGEST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
# What JSON has no way to write but by number, and what it writes with a backslash.
_CONTROLS = (0x00, 0x1F)
_ESCAPED = '"\\\b\f\n\r\t'
# A character of a JSON text, as it is and escaped; without escapes by number.
PLAIN = r"[^\x00-\x1f\x22\x5c\x7f]"
ESCAPED = r'"\x5c" [\x22\x5c/bfnrt]'


def as_rule(pattern: str) -> str:
    """What the whole output matches. Raises PatternError."""
    return _Writer(_literal, _classes, "").rule(pattern)


def as_json_rule(pattern: str) -> str:
    """What a text of JSON, without its quotes, has somewhere in it. Raises PatternError."""
    return _Writer(_json_literal, _json_classes, "json_characters").rule(pattern)


class _Writer:
    """literal, brackets: how a character and a class are written. margin: what may stand where there is no anchor."""

    def __init__(
        self, literal: Callable[[int], str], brackets: Callable[[list[tuple[int, int]]], str], margin: str
    ) -> None:
        self._literal = literal
        self._brackets = brackets
        self._margin = margin

    def rule(self, pattern: str) -> str:
        parts: list[list[tuple[str, str]]] = [[]]
        depth = 0
        for kind, text in _tokens(pattern):
            depth += (kind == "group") * (-1 if text == ")" else 1)
            if kind == "bar" and depth == 0:
                parts.append([])
            else:
                parts[-1].append((kind, text))
        return " | ".join(map(self._alternative, parts))

    def _alternative(self, tokens: list[tuple[str, str]]) -> str:
        is_at_begin, is_at_end = tokens[:1] == [("anchor", "^")], tokens[-1:] == [("anchor", "$")]
        inner = tokens[is_at_begin : len(tokens) - is_at_end]
        written = ["" if is_at_begin else self._margin, "(", self._inner(inner), ")", "" if is_at_end else self._margin]
        return " ".join(filter(None, written))

    def _inner(self, tokens: list[tuple[str, str]]) -> str:
        written: list[str] = []
        for kind, text in tokens:
            if kind == "anchor":
                raise PatternError("an anchor that is not at an end of it")
            # An empty text stands where an alternative would have nothing.
            if (kind == "bar" or text == ")") and written[-1:] in ([], ["("], ["|"]):
                written.append('""')
            written.append(self._piece(kind, text))
        return " ".join(written if written and written[-1] != "|" else [*written, '""'])

    def _piece(self, kind: str, text: str) -> str:
        if kind == "literal":
            return self._literal(int(text[3:-1], 16) if text.startswith("\\") else ord(text))
        if kind == "brackets":
            return self._brackets(_ranges(text))
        return "(" if text == "(?:" else text


def _tokens(pattern: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        if found is None or r"\p" in found.group():
            raise PatternError("what is not a letter, a digit or a space in it (\\W, \\D, \\S)")
        tokens.append((str(found.lastgroup), found.group()))
        at = found.end()
    return tokens


def _ranges(brackets: str) -> list[tuple[int, int]]:
    """The code points that a class matches, in order and apart from each other."""
    is_negated = brackets.startswith("[^")
    members, at, found = brackets[2 if is_negated else 1 : -1], 0, list[tuple[int, int]]()
    while at < len(members):
        first, at = _member(members, at)
        last = first
        if members[at : at + 1] == "-":
            last, at = _member(members, at + 1)
        found.append((first, last))
    return without([(0, _LARGEST)], found) if is_negated else without(found, [])


def _member(members: str, at: int) -> tuple[int, int]:
    """A character of a class, and where the next one begins."""
    found = _MEMBER.match(members, at)
    assert found is not None, f"{members!r} is a class of `patterns`"
    code, letter, plain = found.groups()
    if code is not None:
        return int(code, 16), found.end()
    return ord({"t": "\t", "r": "\r", "n": "\n"}[letter] if letter else plain), found.end()


def without(ranges: list[tuple[int, int]], gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of numbers without others, and without the halves of surrogate pairs; in order, none twice."""
    left: list[tuple[int, int]] = []
    at = 0
    for first, last in sorted(ranges):
        at = max(at, first)
        for begin, end in sorted([*gaps, _SURROGATES]):
            if end < at or begin > last:
                continue
            if at < begin:
                left.append((at, begin - 1))
            at = end + 1
        if at <= last:
            left.append((at, last))
            at = last + 1
    return left


def quoted(text: str) -> str:
    """A text as a grammar has it."""
    return '"' + "".join(map(_written, map(ord, text))) + '"'


def _written(code: int) -> str:
    if code < 0x80 and chr(code).isalnum():
        return chr(code)
    # Escapes by \x take in all the digits that follow.
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _literal(code: int) -> str:
    return quoted(chr(code))


def _classes(ranges: list[tuple[int, int]]) -> str:
    if not ranges:
        raise PatternError("a class that matches nothing")
    return "[" + "".join(f"{_written(first)}-{_written(last)}" for first, last in ranges) + "]"


def _json_literal(code: int) -> str:
    if code <= _CONTROLS[1] and chr(code) not in _ESCAPED:
        raise PatternError(f"the character {chr(code)!r}, which JSON writes by number")
    return quoted(json.dumps(chr(code), ensure_ascii=False)[1:-1])


def _json_classes(ranges: list[tuple[int, int]]) -> str:
    escaped = [char for char in _ESCAPED if any(first <= ord(char) <= last for first, last in ranges)]
    plain = without(ranges, [_CONTROLS, (0x22, 0x22), (0x5C, 0x5C)])
    alternatives = [*([_classes(plain)] if plain else []), *map(_json_literal, map(ord, escaped))]
    if not alternatives:
        raise PatternError("a class of characters that JSON writes by number")
    return "(" + " | ".join(alternatives) + ")"
