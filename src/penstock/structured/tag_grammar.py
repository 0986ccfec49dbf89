"""Structural tags as grammars in Lark's notation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.structured import structural_tag as tags

_TEXT = r"TEXT: /(.|\n)*/"


class TagGrammar:
    """Writer of a structural tag's grammar.

    write_schema: writes a schema as JSON text, with llguidance's options. split: splits a text at special tokens, which
    are every second piece. token_id: id of a special token.
    """

    def __init__(
        self,
        write_schema: Callable[[dict[str, Any]], str],
        split: Callable[[str], Sequence[str]],
        token_id: Callable[[str], int],
    ) -> None:
        self._write_schema = write_schema
        self._split = split
        self._token_id = token_id
        self._rules: list[str] = []

    def source(self, format: tags.Format) -> str:
        start = self._expression(format)
        return "\n".join([f"start: {start}", *dict.fromkeys(self._rules)])

    def _expression(self, format: tags.Format) -> str:
        match format:
            case tags.ConstString(value):
                return " ".join(self._terms(value)) or '""'
            case tags.JSONSchema(schema):
                return f"%json {self._write_schema(schema)}"
            case tags.Regex(pattern):
                return self._terminal(f"/{pattern}/")
            case tags.Sequence(elements):
                return " ".join(f"({self._expression(element)})" for element in elements)
            case tags.Or(elements):
                return _one_of(map(self._expression, elements))
            case tags.Tag(begin, content, end):
                return " ".join([*self._terms(begin), f"({self._expression(content)})", *self._terms(end)])
            case tags.SeparatedTags():
                return self._separated(format)
            case tags.TriggeredTags():
                return self._triggered(format)

    def _separated(self, format: tags.SeparatedTags) -> str:
        one = f"part_{len(self._rules)}"
        self._rules.append(f"{one}: {_one_of(map(self._expression, format.tags))}")
        more = "" if format.stop_after_first else f" ({' '.join([*self._terms(format.separator), one])})*"
        return f"{one}{more}" if format.at_least_one else f"({one}{more})?"

    def _triggered(self, format: tags.TriggeredTags) -> str:
        """Write free text, where each trigger is followed by one of its tags.

        Special tokens in begin and end are matched as such tokens. A trigger also matches in ordinary tokens.
        """
        self._rules.append(_TEXT)
        parts = _one_of(map(self._triggered_tag, format.tags))
        return f"{parts} | TEXT" if format.stop_after_first else f"{parts}* TEXT"

    def _triggered_tag(self, tag: tags.Tag) -> str:
        lazy = f"begin_{len(self._rules)}"
        self._rules.append(f"{lazy}[lazy]: TEXT {json.dumps(tag.trigger)}")
        begins = [" ".join([lazy, *self._terms(tag.begin[len(tag.trigger) :])])]
        before, *special = self._split(tag.begin)
        if special and len(before) < len(tag.trigger):
            prefix = self._terminal(f"TEXT {json.dumps(before)}")
            begins.append(" ".join([prefix, *self._terms(tag.begin[len(before) :])]))
        return " ".join([_one_of(begins), f"({self._expression(tag.content)})", *self._terms(tag.end)])

    def _terminal(self, body: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _terms(self, text: str) -> list[str]:
        """Terms of a rule for a text: special tokens by their ids, the rest as strings."""
        return [
            f"<[{self._token_id(piece)}]>" if number % 2 else json.dumps(piece)
            for number, piece in enumerate(self._split(text))
            if piece
        ]


def _one_of(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"
