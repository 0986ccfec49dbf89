"""Translation of regular expressions of JSON Schema and Python to llguidance's dialect.

The dialects differ: in what a dot, `\\w` or `\\s` matches, and in what is special inside brackets. A translation
matches no more than all of them agree on; ambiguous patterns, and those that no automaton can match, are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_QUANTIFIER = re.compile(r"\{(\d+)(,\d*)?\}")
_UPPER_BOUND_ALONE = re.compile(r"\{,\d+\}")
_GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")
_NUMBERED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4}))")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_SPECIAL_LETTERS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B, "f": 0x0C, "0": 0x00}
_LOOKAROUNDS = {
    "(?=": "a lookahead",
    "(?!": "a negative lookahead",
    "(?<=": "a lookbehind",
    "(?<!": "a negative lookbehind",
}
# Members of character classes. For \s and \S: characters that all dialects, or no dialect, take for a space.
_SPACES = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_PERHAPS_SPACES = _SPACES + r"\x{1c}-\x{1f}\x{85}\x{feff}"
_DIGITS, _WORD = "0-9", "0-9A-Za-z_"
_PERHAPS_DIGITS, _PERHAPS_WORD = r"\p{N}", r"_\p{Alphabetic}\p{M}\p{N}\p{Pc}"
# By letter: the characters that all dialects match, and those that some do.
_CLASSES = {"d": (_DIGITS, _PERHAPS_DIGITS), "w": (_WORD, _PERHAPS_WORD), "s": (_SPACES, _PERHAPS_SPACES)}
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_MAX_DEPTH = 50
# Largest number in a quantifier, and of characters; below llguidance's limit, 2**32.
MAX_REPEATED = 2**31
_MAX_SHOWN = 40


class PatternError(ValueError):
    """Pattern that cannot be enforced. what: what is wrong, and its position. advice: what to do."""

    def __init__(self, what: str, advice: str = "Allowed: patterns without it") -> None:
        super().__init__(f"{what}. {advice}")
        self.what = what
        self.advice = advice


def translate_search(pattern: str) -> str:
    """Translate a pattern that is searched in a text, as in a schema. Raises PatternError."""
    return _Translation(pattern).run()


def translate_full_match(pattern: str) -> str:
    """Translate a pattern that the whole text must match, without anchors at its ends. Raises PatternError."""
    return _Translation(pattern, is_full_match=True).run()


@dataclass
class _Translation:
    pattern: str
    is_full_match: bool = False
    at: int = 0
    # Positions of open groups.
    open_at: list[int] = field(default_factory=list)
    # Whether the last part may be repeated.
    has_atom: bool = False
    parts: list[str] = field(default_factory=list)

    def run(self) -> str:
        while self.at < len(self.pattern):
            self._step(self.pattern[self.at])
        if self.open_at:
            self.at = self.open_at[-1]
            raise self._error("a '(' that is not closed", "Close it by ')', or write '\\(' for the character")
        return "".join(self.parts)

    def _step(self, char: str) -> None:
        if char == "\\":
            self._write(self._escape_outside())
        elif char == "[":
            self._write(self._brackets())
        elif char == ".":
            self._write(_DOT, 1)
        elif char in "()":
            self._group(char)
        elif char in "*+?{":
            self._quantify(char)
        elif char == "|":
            self._write("|", 1, is_atom=False)
        elif char in "^$":
            self._anchor(char)
        else:
            self._write(literal(ord(char)), 1)

    def _write(self, text: str, length: int = 0, *, is_atom: bool = True) -> None:
        self.parts.append(text)
        self.at += length
        self.has_atom = is_atom

    def _error(self, what: str, *advice: str) -> PatternError:
        near = self.pattern
        if len(near) > _MAX_SHOWN:
            begin = max(0, min(self.at - _MAX_SHOWN // 2, len(near) - _MAX_SHOWN))
            end = begin + _MAX_SHOWN
            near = f"{'…' * (begin > 0)}{near[begin:end]}{'…' * (end < len(self.pattern))}"
        return PatternError(f"{near!r} has {what} at position {self.at}", *advice)

    def _group(self, char: str) -> None:
        if char == ")":
            if not self.open_at:
                raise self._error("a ')' that closes nothing", "Remove it, or write '\\)' for the character")
            self.open_at.pop()
            self._write(")", 1)
            return
        for begin, name in _LOOKAROUNDS.items():
            if self.pattern.startswith(begin, self.at):
                raise self._error(f"{name} {begin}…), which cannot be enforced")
        opened = _GROUP.match(self.pattern, self.at)
        if opened is None:
            raise self._error("a group of an unknown kind")
        if len(self.open_at) >= _MAX_DEPTH:
            raise self._error(f"groups nested more than {_MAX_DEPTH} deep")
        self.open_at.append(self.at)
        self._write("(?:", len(opened.group()), is_atom=False)

    def _quantify(self, char: str) -> None:
        text = char
        if char == "{":
            match = _QUANTIFIER.match(self.pattern, self.at)
            if match is None:
                if _UPPER_BOUND_ALONE.match(self.pattern, self.at):
                    raise self._error("{,…}, which dialects read in different ways")
                self._write(literal(ord("{")), 1)
                return
            text = match.group()
            if any(len(number) > 10 or int(number) > MAX_REPEATED for number in re.findall("[0-9]+", text)):
                raise self._error(f"{text[:_MAX_SHOWN]!r}, which repeats more than {MAX_REPEATED:,} times")
        if not self.has_atom:
            raise self._error(f"{text!r} with nothing to repeat", f"Put what it repeats before it, or write '\\{char}'")
        self._write(text, len(text), is_atom=False)
        # Lazy quantifiers match the same texts.
        if self.pattern[self.at : self.at + 1] == "?":
            self.at += 1

    def _anchor(self, char: str) -> None:
        if not self.is_full_match:
            self._write(char, 1, is_atom=False)
            return
        beside = self.pattern[self.at - 1 : self.at] if char == "^" else self.pattern[self.at + 1 : self.at + 2]
        if self.open_at or beside not in ("", "|"):
            raise self._error(f"a {char!r} in its middle, which cannot be enforced")
        self._write("", 1, is_atom=False)

    def _escape_outside(self) -> str:
        letter = self._escaped_letter()
        if letter.lower() in _CLASSES:
            self.at += 2
            surely, perhaps = _CLASSES[letter.lower()]
            return f"[{surely}]" if letter.islower() else f"[^{perhaps}]"
        if letter in "bBAZz":
            raise self._error(f"\\{letter}, which cannot be enforced")
        return literal(self._escaped_character(letter))

    def _escaped_letter(self) -> str:
        if self.at + 1 >= len(self.pattern):
            raise self._error("a backslash that escapes nothing", "Write '\\\\' for the character")
        return self.pattern[self.at + 1]

    def _escaped_character(self, letter: str) -> int:
        """Read the code point of an escaped character."""
        if letter in _SPECIAL_LETTERS and not (letter == "0" and self.pattern[self.at + 2 : self.at + 3].isdigit()):
            self.at += 2
            return _SPECIAL_LETTERS[letter]
        match = _NUMBERED.match(self.pattern, self.at)
        if match is not None:
            self.at = match.end()
            return self._with_low_surrogate(int(match.group(1) or match.group(2), 16))
        if letter.isalnum() or ord(letter) > 0x7F:
            raise self._error(f"\\{letter}, which is not known or cannot be enforced")
        self.at += 2
        return ord(letter)

    def _with_low_surrogate(self, code: int) -> int:
        if not 0xD800 <= code <= 0xDFFF:
            return code
        low = _LOW_SURROGATE.match(self.pattern, self.at)
        if code >= 0xDC00 or low is None:
            raise self._error("half of a surrogate pair")
        self.at = low.end()
        return 0x10000 + ((code - 0xD800) << 10) + (int(low.group(1), 16) - 0xDC00)

    def _brackets(self) -> str:
        start = self.at
        self.at += 1
        negated = self.pattern[self.at : self.at + 1] == "^"
        self.at += negated
        if self.pattern[self.at : self.at + 1] == "]":
            raise self._error("']' right after '[', which dialects read in different ways")
        members: list[str] = []
        while self.pattern[self.at : self.at + 1] != "]":
            if self.at >= len(self.pattern):
                self.at = start
                raise self._error("a '[' that is not closed", "Close it by ']', or write '\\[' for the character")
            members.append(self._member(negated))
        self.at += 1
        return f"[{'^' if negated else ''}{''.join(members)}]"

    def _member(self, negated: bool) -> str:
        first = self._one_of_brackets(negated)
        is_range = self.pattern[self.at : self.at + 1] == "-" and self.pattern[self.at + 1 : self.at + 2] not in (
            "]",
            "",
        )
        if not is_range:
            return first if isinstance(first, str) else literal(first)
        self.at += 1
        last = self._one_of_brackets(negated)
        if isinstance(first, str) or isinstance(last, str):
            raise self._error("a range from or to a class of characters")
        if first > last:
            raise self._error("a range that is in the wrong order", "Write the lower character first")
        return f"{literal(first)}-{literal(last)}"

    def _one_of_brackets(self, negated: bool) -> str | int:
        """Read a code point, or the members of a class."""
        char = self.pattern[self.at]
        if char != "\\":
            self.at += 1
            return ord(char)
        letter = self._escaped_letter()
        if letter.lower() in _CLASSES:
            self.at += 2
            surely, perhaps = _CLASSES[letter.lower()]
            if letter.isupper():
                return f"[^{surely if negated else perhaps}]"
            return perhaps if negated else surely
        if letter == "b":
            self.at += 2
            return 0x08
        return self._escaped_character(letter)


def literal(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"
