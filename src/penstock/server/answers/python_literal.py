"""Incremental translation of Python literals to JSON text."""

from __future__ import annotations

import ast
import json
import re

_SPECIAL = re.compile(r"""[\\"'\x00-\x1f]""")
_ESCAPE = re.compile(r"\\(?:x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8}|[0-7]{1,3}|[^xuU0-7])", re.DOTALL)
_PART_OF_ESCAPE = re.compile(r"\\(?:x[\da-fA-F]?|u[\da-fA-F]{0,3}|U[\da-fA-F]{0,7}|[0-7]{0,2})")
_CLOSERS = {"[": "]", "(": "]", "{": "}"}
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
# Escapes that JSON lacks; others, and "/" of JSON, are handled by `_unescaped`.
_CHARACTERS = {"'": "'", "/": "/", "\n": "", "a": "\\u0007", "v": "\\u000b"}


class LiteralScanner:
    """Translator of one Python literal, which comes in pieces: strings as they come, other values when they end.

    JSON is taken as well. Checks nesting only. done: whether the value has ended.
    """

    def __init__(self) -> None:
        self.done = False
        self._closers: list[str] = []
        self._quote = ""
        self._word = ""
        self._has_comma = False
        self._written: list[str] = []

    def take(self) -> str:
        """Return the JSON text since the last call."""
        taken = "".join(self._written)
        self._written.clear()
        return taken

    def scan(self, text: str, at: int) -> int:
        """Scan text from a position on. Returns the position behind what was scanned.

        The beginning of an escape is left, and so is the character behind the value.
        """
        while at < len(text) and not self.done:
            end = self._scan_string(text, at) if self._quote else self._scan_mark(text[at], at)
            if end == at:
                break
            at = end
        return at

    def _scan_mark(self, char: str, at: int) -> int:
        """Scan one character outside of strings."""
        if char.isalnum() or char in "_.+-":
            self._word += char
            return at + 1
        if self._word:
            self._write_value(_word_as_json(self._word))
            self._word = ""
            self._end_value()
            return at + 1 if self.done and char.isspace() else at if self.done else self._scan_mark(char, at)
        if char in "\"'":
            self._quote = char
            self._write_value('"')
        elif char in _CLOSERS:
            self._write_value("{" if char == "{" else "[")
            self._closers.append(_CLOSERS[char])
        elif char in ")]}" and self._closers:
            self._has_comma = False
            self._written.append(self._closers.pop())
            self._end_value()
        elif char in ",:" and self._closers:
            self._has_comma = char == ","
            self._written.append(": " if char == ":" else "")
        elif not char.isspace():
            self.done = True
            return at
        return at + 1

    def _write_value(self, text: str) -> None:
        """Write a value, or its beginning. A comma at the end of a list, as Python allows it, is not written."""
        self._written.append(f", {text}" if self._has_comma else text)
        self._has_comma = False

    def _end_value(self) -> None:
        self.done = not self._closers

    def _scan_string(self, text: str, at: int) -> int:
        found = _SPECIAL.search(text, at)
        end = found.start() if found else len(text)
        self._written.append(text[at:end])
        if found is None or end > at:
            return end
        char = text[at]
        if char == "\\":
            return self._scan_escape(text, at)
        if char == self._quote:
            self._written.append('"')
            self._quote = ""
            self._end_value()
        else:
            self._written.append("'" if char == "'" else json.dumps(char)[1:-1])
        return at + 1

    def _scan_escape(self, text: str, at: int) -> int:
        if _PART_OF_ESCAPE.fullmatch(text, at):
            return at
        found = _ESCAPE.match(text, at)
        self._written.append(_unescaped(found.group()[1:]) if found else "\\\\")
        return found.end() if found else at + 1


def _unescaped(escape: str) -> str:
    """Return an escape of Python, without its backslash, as part of a JSON string."""
    kind = escape[0]
    if kind == "u" or escape in 'nrtbf"\\':
        return f"\\{escape}"
    if kind in "xU01234567":
        number = int(escape, 8) if kind.isdigit() else int(escape[1:], 16)
        return json.dumps(chr(number) if number < 0x110000 else "\ufffd")[1:-1]
    return _CHARACTERS.get(escape, f"\\\\{json.dumps(escape, ensure_ascii=False)[1:-1]}")


def _word_as_json(word: str) -> str:
    """Return a number or constant as JSON, and another word as a string."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    try:
        json.loads(word)
        return word
    except ValueError:
        pass
    try:
        number = ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(word, ensure_ascii=False)
    return json.dumps(number if isinstance(number, int | float) else word, ensure_ascii=False)
