"""Incremental scanners of JSON text: the end of a value, and the object of a tool call."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[,}\]\s]")
_BLANK = re.compile(r"[ \t\r\n]*")
# Longest key or name, in characters, before an object counts as malformed.
_LONGEST_NAME = 1024


class ValueScanner:
    """Finder of the end of one JSON value, which is scanned in pieces. Checks nesting only.

    done: whether the value has ended. kind: its first character.
    """

    def __init__(self) -> None:
        self.done = False
        self.kind = ""
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def scan(self, text: str, at: int) -> int:
        """Scan text from a position on. Returns the position behind the value, or the end of the text."""
        if not self.kind and at < len(text):
            self.kind = text[at]
        if self.kind in '{["':
            return self._scan_nested(text, at)
        found = _SCALAR_END.search(text, at)
        self.done = found is not None
        return found.start() if found else len(text)

    def _scan_nested(self, text: str, at: int) -> int:
        while at < len(text) and not self.done:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            self._take(found.group())
        return at

    def _take(self, char: str) -> None:
        if char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if char in "{[" else -1
        self.done = self._depth <= 0 and not self._in_string and not self._is_escaped


class CallState(Enum):
    """State of a scanned call: it goes on, is complete, or is no call."""

    OPEN = auto()
    DONE = auto()
    MALFORMED = auto()


class _Expected(Enum):
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class _Role(Enum):
    """Meaning of a value within a call. TEXT: arguments as a JSON string."""

    KEY = auto()
    NAME = auto()
    ARGUMENTS = auto()
    TEXT = auto()
    OTHER = auto()


class CallObject:
    """Scanner of a tool call that is a JSON object with a name and arguments, in any order.

    name: None until it has come. has_arguments: whether arguments have begun.
    """

    def __init__(self, name_keys: tuple[str, ...], argument_keys: tuple[str, ...]) -> None:
        self.state = CallState.OPEN
        self.name: str | None = None
        self.has_arguments = False
        self._name_keys = name_keys
        self._argument_keys = argument_keys
        self._arguments: list[str] = []
        self._is_open = False
        self._expected = _Expected.KEY_OR_END
        self._key = ""
        self._value = ValueScanner()
        self._role: _Role | None = None
        self._kept = ""

    def take(self) -> str:
        """Return the characters of the arguments since the last call, as the model wrote them.

        Arguments that are a JSON string are the text in it.
        """
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def scan(self, text: str, at: int) -> int:
        """Scan text from a position on. Returns the position behind what was scanned."""
        while at < len(text) and self.state is CallState.OPEN:
            if self._role is not None:
                at = self._scan_value(text, at, self._role)
                continue
            blank = _BLANK.match(text, at)
            at = blank.end() if blank else at
            if at < len(text):
                at = self._scan_mark(text, at)
        return at

    def _scan_mark(self, text: str, at: int) -> int:
        """Scan one character outside of values. The first one of a value or of malformed text is left."""
        char, expected = text[at], self._expected
        if not self._is_open and char == "{":
            self._is_open = True
        elif char == '"' and self._is_open and expected in (_Expected.KEY, _Expected.KEY_OR_END):
            return self._begin_value(at, _Role.KEY)
        elif char == ":" and expected is _Expected.COLON:
            self._expected = _Expected.VALUE
        elif char not in ",}]:" and expected is _Expected.VALUE:
            return self._begin_value(at, self._role_of_value(char))
        elif char == "," and expected is _Expected.COMMA_OR_END:
            self._expected = _Expected.KEY
        elif char == "}" and expected in (_Expected.KEY_OR_END, _Expected.COMMA_OR_END) and self.name is not None:
            self.state = CallState.DONE
        else:
            self.state = CallState.MALFORMED
            return at
        return at + 1

    def _begin_value(self, at: int, role: _Role) -> int:
        self._value, self._role, self._kept = ValueScanner(), role, ""
        return at

    def _role_of_value(self, first: str) -> _Role:
        if self._key in self._name_keys and self.name is None:
            return _Role.NAME
        if self._key in self._argument_keys and not self.has_arguments:
            self.has_arguments = first in '{"'
            return _Role.ARGUMENTS if first == "{" else _Role.TEXT
        return _Role.OTHER

    def _scan_value(self, text: str, at: int, role: _Role) -> int:
        end = self._value.scan(text, at)
        piece = text[at:end]
        if role is _Role.ARGUMENTS:
            self._arguments.append(piece)
        elif role is not _Role.OTHER:
            self._kept += piece
            if role is not _Role.TEXT and len(self._kept) > _LONGEST_NAME:
                self.state = CallState.MALFORMED
        if self._value.done:
            self._end_value(role)
        return end

    def _end_value(self, role: _Role) -> None:
        self._role = None
        self._expected = _Expected.COLON if role is _Role.KEY else _Expected.COMMA_OR_END
        if role in (_Role.ARGUMENTS, _Role.OTHER):
            return
        value = _parsed(self._kept)
        if role is _Role.KEY and isinstance(value, str):
            self._key = value
        elif role is _Role.NAME and isinstance(value, str) and value:
            self.name = value
        elif role is _Role.TEXT and isinstance(value, str):
            self._arguments.append(value)
        elif role is not _Role.TEXT or self._kept != "null":
            self.state = CallState.MALFORMED


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
