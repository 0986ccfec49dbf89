"""Tokeniser and parser of llguidance's dialect of Lark grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from penstock.structured.grammar_rules import BodyToken, Kind

# Possessive quantifiers: no backtracking.
_TOKEN = re.compile(
    r"""(?P<blank>[ \t]++|(?:\#|//)[^\n]*+)
    |(?P<newline>(?:\r?\n)++[ \t]*+)
    |(?P<string>"(?:\\.|[^"\\\n])*+"i?)
    |(?P<regex>/(?:\\.|[^/\\])++/[imslux]*+)
    |(?P<special><[^<>\s]++>)
    |(?P<keyword>%[a-z]++)
    |(?P<name>!?[_?]?[a-z][_a-z0-9-]*+|_?[A-Z][_A-Z0-9-]*+)
    |(?P<number>[+-]?[0-9]++)
    |(?P<mark>->|::|\.\.|[:=,.(){}\[\]~|&+*?@_])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_BLANKS = re.compile(r"[ \t\r\n]*+")
# Directives with a JSON argument.
_BEFORE_JSON = ("%json", "%regex", "%llguidance")
_MARKS = {
    "(": Kind.OPEN,
    ")": Kind.CLOSE,
    "[": Kind.OPEN_OPTION,
    "]": Kind.CLOSE_OPTION,
    "|": Kind.OR,
    "*": Kind.ZERO_OR_MORE,
    "?": Kind.ZERO_OR_MORE,
    "+": Kind.REPEAT,
}
_TERMINALS = ("string", "regex", "special", "json")


class LarkToken(NamedTuple):
    """Token at a position of the text. kind: group name of `_TOKEN`, or "json". value: data of JSON."""

    kind: str
    text: str
    at: int
    value: Any = None


class GrammarTextError(ValueError):
    """Invalid grammar. what: what is wrong. at: position in the text; None for no single position."""

    def __init__(self, what: str, text: str, at: int | None) -> None:
        super().__init__(what if at is None else f"{what} at {position(text, at)}")


def position(text: str, at: int) -> str:
    """Line and column of a position, for messages."""
    return f"line {text.count(chr(10), 0, at) + 1}, column {at - text.rfind(chr(10), 0, at)}"


def lark_tokens(text: str) -> Iterator[LarkToken]:
    """Tokenise a grammar, without blanks and comments. Raises GrammarTextError."""
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        assert found is not None, "its last alternative matches any character"
        kind = found.lastgroup or ""
        if kind == "other":
            char = found.group()
            if char in '"/':
                raise GrammarTextError("an unterminated " + ("string" if char == '"' else "regex"), text, at)
            raise GrammarTextError(f"an unexpected character {char!r}", text, at)
        at = found.end()
        if kind != "blank":
            yield LarkToken(kind, found.group(), found.start())
        if found.group() in _BEFORE_JSON:
            blanks = _BLANKS.match(text, at)
            begin = at if blanks is None else blanks.end()
            try:
                value, at = json.JSONDecoder().raw_decode(text, begin)
            except (ValueError, RecursionError) as error:
                raise GrammarTextError(f"invalid JSON after {found.group()} ({error})", text, begin) from error
            yield LarkToken("json", text[begin:at], begin, value)


def lark_rules(tokens: Sequence[LarkToken]) -> list[dict[str, list[BodyToken]]]:
    """Read the rules of a grammar, and those of each inner grammar (`%lark {…}`).

    For grammars that llguidance rejects, the result is unspecified. %if conditions are ignored.
    """
    whole, inner = _without_inner(tokens)
    return [_rules(whole), *(rules for part in inner for rules in lark_rules(part))]


def _without_inner(tokens: Sequence[LarkToken]) -> tuple[list[LarkToken], list[list[LarkToken]]]:
    """Replace each inner grammar by one terminal; return the tokens, and those of the inner grammars."""
    whole: list[LarkToken] = []
    inner: list[list[LarkToken]] = []
    depth = 0
    for number, token in enumerate(tokens):
        if depth:
            depth += (token.text == "{") - (token.text == "}")
            if depth:
                inner[-1].append(token)
        elif token.text == "{" and number and tokens[number - 1].text == "%lark":
            depth = 1
            inner.append([])
            whole.append(LarkToken("string", "", token.at))
        else:
            whole.append(token)
    return whole, inner


def _rules(tokens: list[LarkToken]) -> dict[str, list[BodyToken]]:
    rules: dict[str, list[BodyToken]] = {}
    for item in _items(tokens):
        if item[0].kind != "name":
            continue
        colon = next((number for number, token in enumerate(item) if token.text == ":"), None)
        if colon is not None:
            rules.setdefault(item[0].text.lstrip("!?"), []).extend(_body(item[colon + 1 :]))
    return rules


def _items(tokens: list[LarkToken]) -> Iterator[list[LarkToken]]:
    """Split into rules and statements: each ends with its line, unless the next line begins with `|`."""
    item: list[LarkToken] = []
    has_ended = False
    for token in tokens:
        if token.kind == "newline":
            has_ended = True
            continue
        if has_ended and item and token.text != "|":
            yield item
            item = []
        has_ended = False
        item.append(token)
    if item:
        yield item


def _body(tokens: list[LarkToken]) -> Iterator[BodyToken]:
    number = 0
    while number < len(tokens):
        token = tokens[number]
        following = tokens[number + 1] if number + 1 < len(tokens) else None
        number += 1
        if token.text in ("->", "%if"):
            # Aliases and conditions match nothing.
            number = _find(tokens, number, lambda other: other.text == "|")
        elif (
            token.text in ("{", "~") and following is not None and (following.kind == "number" or following.text == ",")
        ):
            is_optional = following.text == "," or set(following.text) <= set("+-0")
            yield BodyToken(Kind.ZERO_OR_MORE if is_optional else Kind.REPEAT, token.text)
            number = _find(tokens, number, lambda other: other.kind != "number" and other.text not in (",", ".."))
            number += token.text == "{"
        elif token.kind == "name":
            yield BodyToken(Kind.NAME, token.text.lstrip("!?"))
        elif token.kind in _TERMINALS:
            yield BodyToken(Kind.TERMINAL, token.text)
        elif token.text in _MARKS:
            yield BodyToken(_MARKS[token.text], token.text)


def _find(tokens: list[LarkToken], begin: int, matches: Callable[[LarkToken], bool]) -> int:
    """Index of the first token from `begin` on that matches; len(tokens) if none does."""
    return next((index for index in range(begin, len(tokens)) if matches(tokens[index])), len(tokens))
