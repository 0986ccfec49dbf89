"""Meanings of options in the docstrings of their classes, for help texts and pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


def meanings_in(docstring: str | None, names: Iterable[str]) -> dict[str, str]:
    """Return the meanings of names in a docstring. `a, b: meaning of both` begins a line, or follows a full stop."""
    name = "|".join(sorted(names, key=len, reverse=True))
    begin = re.compile(rf"(?:^|(?<=\. ))((?:{name})(?:, (?:{name}))*): ")
    meanings: dict[str, str] = {}
    for text in _entries(docstring or "", begin):
        found = list(begin.finditer(text))
        ends = [*(one.start() for one in found[1:]), len(text)]
        for one, end in zip(found, ends, strict=True):
            meaning = text[one.end() : end].strip().rstrip(".")
            meanings.update(dict.fromkeys(one[1].split(", "), meaning))
    return meanings


def _entries(docstring: str, begin: re.Pattern[str]) -> Iterator[str]:
    """Lines that begin with a name, each joined with those that go on with it: up to an empty line or the next name."""
    entry = ""
    for line in [*map(str.strip, docstring.splitlines()), ""]:
        if entry and (not line or begin.match(line)):
            yield entry
            entry = ""
        if entry or begin.match(line):
            entry = f"{entry} {line}".strip()
