"""Control characters in text from elsewhere, which must neither forge lines of a log nor command a terminal."""

from __future__ import annotations

import re

# C0 and C1 controls, line and paragraph separators, overrides of the writing direction, lone surrogates.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_CONTROLS_IN_LINES = re.compile(_CONTROLS.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def one_line(text: str) -> str:
    """Text with an escape, such as \\n or \\x1b, for each control character."""
    return _CONTROLS.sub(_escape, text)


def lines(text: str) -> str:
    """Text of several lines, with an escape for each control character but tabs and line feeds."""
    return _CONTROLS_IN_LINES.sub(_escape, text)


def without_controls(text: str) -> str:
    """Text of several lines without control characters but tabs and line feeds, for a terminal."""
    return _CONTROLS_IN_LINES.sub("", text)


def _escape(control: re.Match[str]) -> str:
    return repr(control[0])[1:-1]
