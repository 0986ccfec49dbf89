"""Reader of GBNF grammars as llama.cpp has them, and their translation to Lark's notation.

Unlike in llama.cpp, an alternative may begin on a line of its own, and any punctuation may be escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from penstock.structured.derivations import productive
from penstock.structured.grammar_rules import BodyToken, Kind, as_repetition, names_in
from penstock.structured.lark_text import GrammarTextError

_RULE = re.compile(r"[ \t]*+(?P<name>[\w-]++)[ \t]*+::=")
_TOKEN = re.compile(
    r"""(?P<blank>[ \t]++|\#[^\r\n]*+)
    |(?P<newline>\r?\n|\r)
    |(?P<string>"(?:\\.|[^"\\])*+")
    |(?P<characters>\[\^?(?:\\.|[^\]\\])*+\])
    |(?P<name>[\w-]++)
    |(?P<repeat>\{\s*+(?P<least>\d*+)\s*+(?P<comma>,?)\s*+(?P<most>\d*+)\s*+\})
    |(?P<mark>[().|*+?])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_MARKS = {
    "(": Kind.OPEN,
    ")": Kind.CLOSE,
    "|": Kind.OR,
    "*": Kind.ZERO_OR_MORE,
    "?": Kind.ZERO_OR_MORE,
    "+": Kind.REPEAT,
    ".": Kind.TERMINAL,
}
_QUANTIFIERS = (Kind.ZERO_OR_MORE, Kind.REPEAT)
# Kinds of tokens at the end of a repetition's operand.
_OPERAND_ENDS = (Kind.NAME, Kind.TERMINAL, Kind.CLOSE)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt])|([!-/:-@\[-`{-~]))|([^\\])", re.DOTALL
)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = "/(?s:.)/"
_ROOT, _START = "root", "start"
_DIGITS = 9


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is in GBNF."""
    return re.search(r"^[ \t]*+[\w-]++[ \t]*+::=", grammar, re.MULTILINE) is not None


def gbnf_rules(text: str) -> dict[str, list[BodyToken]]:
    """Read the rules of a grammar, with terminals in Lark's notation.

    Raises GrammarTextError for invalid GBNF: syntax errors, duplicate rules, undefined names.
    """
    rules: dict[str, list[BodyToken]] = {}
    at = _skip_lines(text, 0)
    while at < len(text):
        found = _RULE.match(text, at)
        if found is None:
            raise GrammarTextError("no rule (name ::= …)", text, at)
        name = found.group("name")
        if name in rules:
            raise GrammarTextError(f"the rule {name!r} a second time", text, at)
        reader = _Body(text, found.end())
        rules[name] = list(reader.tokens())
        at = _skip_lines(text, reader.at)
    for name, body in rules.items():
        missing = next((other for other in names_in(body) if other not in rules), None)
        if missing is not None:
            raise GrammarTextError(f"{missing!r} in the rule {name!r}, but no rule of that name", text, None)
    if _ROOT not in rules:
        raise GrammarTextError(f"no rule {_ROOT!r}, with which an output begins", text, None)
    return rules


def as_lark_text(rules: Mapping[str, list[BodyToken]]) -> str:
    """Write rules in Lark's notation. A rule without recursion becomes a terminal, matched as one expression.

    Rules with the recursion last are written as repetitions: llguidance keeps an item for each level.
    """
    terminals = productive((name, names_in(body)) for name, body in rules.items())
    rules = {name: as_repetition(name, body) for name, body in rules.items()}
    names = _lark_names(rules, terminals)
    lines = [f"{_START}: {names[_ROOT]}"] if _ROOT in terminals else []
    for name, body in rules.items():
        words = [names[token.text] if token.kind is Kind.NAME else token.text for token in body]
        lines.append(f"{names[name]}: {' '.join(words)}")
    return "\n".join(lines)


def _lark_names(rules: Mapping[str, list[BodyToken]], terminals: set[str]) -> dict[str, str]:
    """Map names to Lark's notation, where terminals have capitals and rules have none."""
    names = {} if _ROOT in terminals else {_ROOT: _START}
    taken = {_START}
    for name in [name for name in rules if name not in names]:
        plain = re.sub("[^a-z0-9_]", "_", name.lower())
        base = plain if plain[0].isalpha() else f"r{plain}"
        # Numbered without a search, so that many colliding names stay cheap.
        lark = base if base not in taken else f"{base}_{len(taken)}"
        while lark in taken:
            lark += "_"
        taken.add(lark)
        names[name] = lark.upper() if name in terminals else lark
    return names


def _skip_lines(text: str, at: int) -> int:
    """Position after blanks and comments."""
    while at < len(text):
        found = _TOKEN.match(text, at)
        assert found is not None, "its last alternative matches any character"
        if found.lastgroup not in ("blank", "newline"):
            break
        at = found.end()
    return at


class _Body:
    """Reader of a rule's body. at: current position."""

    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self.at = at

    def tokens(self) -> Iterator[BodyToken]:
        last: Kind | None = None
        open_at: list[int] = []
        # The body may begin on another line.
        self.at = _skip_lines(self._text, self.at)
        while self.at < len(self._text):
            token = self._next(is_nested=bool(open_at) or last is Kind.OR)
            if token is None:
                break
            if token.kind is Kind.OPEN:
                open_at.append(self.at - 1)
            elif token.kind is Kind.CLOSE:
                if not open_at:
                    raise self._error("a ')' that closes nothing", self.at - 1)
                open_at.pop()
            elif token.kind in _QUANTIFIERS and last not in _OPERAND_ENDS:
                raise self._error(f"{token.text!r} with nothing to repeat", self.at - len(token.text))
            last = token.kind
            yield token
        if open_at:
            raise self._error("a '(' that is not closed", open_at[-1])

    def _next(self, *, is_nested: bool) -> BodyToken | None:
        """Return the next token; None at the end of the rule. is_nested: within a group, where lines may end."""
        while self.at < len(self._text):
            begin = self.at
            found = _TOKEN.match(self._text, begin)
            assert found is not None, "its last alternative matches any character"
            kind, word = found.lastgroup, found.group()
            if kind == "newline":
                following = _skip_lines(self._text, begin)
                goes_on = self._text[following : following + 1] == "|"
                if not is_nested and not goes_on:
                    return None
                self.at = following
                continue
            self.at = found.end()
            if kind == "blank":
                continue
            if kind == "name":
                return BodyToken(Kind.NAME, word)
            if kind == "string":
                return BodyToken(Kind.TERMINAL, json.dumps("".join(self._characters(begin + 1, found.end() - 1))))
            if kind == "characters":
                return BodyToken(Kind.TERMINAL, self._class(begin, found.end()))
            if kind == "mark":
                return BodyToken(_MARKS[word], _ANY if word == "." else word)
            if kind == "repeat":
                return self._repetition(found, begin)
            raise self._error(_MEANINGLESS.get(word, f"{word!r}, which means nothing there,"), begin)
        return None

    def _repetition(self, found: re.Match[str], begin: int) -> BodyToken:
        least, comma, most = found.group("least"), found.group("comma"), found.group("most")
        if len(least) > _DIGITS or len(most) > _DIGITS or not (least or most) or (most and not comma):
            raise self._error(f"{found.group()!r}, which is not a repetition,", begin)
        at_least = int(least or 0)
        at_most = int(most) if most else at_least + 1 if comma else at_least
        if at_most < max(at_least, 1):
            raise self._error(f"{found.group()!r}, which repeats nothing,", begin)
        kind = Kind.REPEAT if at_least else Kind.ZERO_OR_MORE
        return BodyToken(kind, f"{{{at_least}{f',{most}' if comma else ''}}}")

    def _class(self, begin: int, end: int) -> str:
        """Read a character class as a regular expression."""
        negated = self._text[begin + 1] == "^"
        at = begin + 1 + negated
        if at == end - 1:
            if negated:
                return _ANY
            raise self._error("'[]', which matches nothing,", begin)
        members = list(self._members(at, end - 1))
        return f"/[{'^' if negated else ''}{''.join(members)}]/"

    def _members(self, at: int, end: int) -> Iterator[str]:
        while at < end:
            begin = at
            low, at = self._character(at)
            high = low
            if self._text[at : at + 1] == "-" and at + 1 < end:
                high, at = self._character(at + 1)
            if high < low:
                raise self._error(f"{self._text[begin:at]!r}, a range in the wrong order,", begin)
            yield _numbered(low) if low == high else f"{_numbered(low)}-{_numbered(high)}"

    def _characters(self, at: int, end: int) -> Iterator[str]:
        while at < end:
            char, at = self._character(at)
            yield char

    def _character(self, at: int) -> tuple[str, int]:
        """Read a character, which may be escaped; return it and the position after it."""
        found = _CHARACTER.match(self._text, at)
        if found is None:
            raise self._error(f"{self._text[at : at + 2]!r}, an escape that is not known,", at)
        short, medium, long, letter, punctuation, plain = found.groups()
        number = short or medium or long
        if number is not None:
            code = int(number, 16)
            if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
                raise self._error(f"{found.group()!r}, which is not a character,", at)
            return chr(code), found.end()
        return _LETTERS[letter] if letter else punctuation or plain, found.end()

    def _error(self, what: str, at: int) -> GrammarTextError:
        return GrammarTextError(what, self._text, at)


_MEANINGLESS = {
    '"': "a '\"' that is not closed",
    "[": "a '[' that is not closed",
    "{": "a '{' that begins no repetition",
}


def _numbered(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"
