"""Structural tags as grammars in Lark's notation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from penstock.structured import structural_tag as tags

_ANY = r"/(.|\n)*/"


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
        self._names: dict[str, str] = {}

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
            case tags.AnyText():
                return self._terminal(_ANY)
            case tags.Tag(begin):
                return " ".join([*self._terms(begin), self._body(format)])
            case tags.SeparatedTags():
                return self._separated(format)
            case tags.TriggeredTags():
                return self._triggered(format)

    def _body(self, tag: tags.Tag) -> str:
        """Write a tag without its beginning. Any text ends where the tag's end begins."""
        before = self._split(tag.end)[0]
        if isinstance(tag.content, tags.AnyText) and before:
            lazy = self._rule(f"{self._terminal(_ANY)} {json.dumps(before)}", "[lazy]")
            return " ".join([lazy, *self._terms(tag.end[len(before) :])])
        return " ".join([f"({self._expression(tag.content)})", *self._terms(tag.end)])

    def _separated(self, format: tags.SeparatedTags) -> str:
        one = self._rule(_one_of(map(self._expression, format.tags)))
        more = "" if format.stop_after_first else f" ({' '.join([*self._terms(format.separator), one])})*"
        return f"{one}{more}" if format.at_least_one else f"({one}{more})?"

    def _triggered(self, format: tags.TriggeredTags) -> str:
        """Write free text, where each trigger is followed by one of its tags.

        Special tokens in begin and end are matched as such tokens. A trigger also matches in ordinary tokens. Tags
        share the terminals of their triggers, since each one costs time in every mask of free text.
        """
        text = self._terminal(_ANY)
        by_terminal: dict[str, list[str]] = {}
        for tag in format.tags:
            body = self._rule(self._body(tag))
            for terminal, num_matched in self._begins(tag):
                by_terminal.setdefault(terminal, []).append(" ".join([*self._terms(tag.begin[num_matched:]), body]))
        parts = _one_of(f"{terminal} {_one_of(bodies)}" for terminal, bodies in by_terminal.items())
        return f"{parts} | {text}" if format.stop_after_first else f"{parts}* {text}"

    def _begins(self, tag: tags.Tag) -> Iterator[tuple[str, int]]:
        """Terminals of free text up to a tag, and the characters of its beginning that they match."""
        text = self._terminal(_ANY)
        yield self._rule(f"{text} {json.dumps(tag.trigger)}", "[lazy]"), len(tag.trigger)
        before, *special = self._split(tag.begin)
        if special and len(before) < len(tag.trigger):
            yield self._terminal(f"{text} {json.dumps(before)}"), len(before)

    def _rule(self, body: str, attributes: str = "") -> str:
        return self._named("rule_", attributes, body)

    def _terminal(self, body: str) -> str:
        return self._named("T", "", body)

    def _named(self, prefix: str, attributes: str, body: str) -> str:
        """Name of a rule with this body, the same one for equal bodies."""
        key = f"{prefix}{attributes}: {body}"
        if key not in self._names:
            self._names[key] = f"{prefix}{len(self._names)}"
            self._rules.append(f"{self._names[key]}{attributes}: {body}")
        return self._names[key]

    def _terms(self, text: str) -> list[str]:
        """Terms of a rule for a text: special tokens by their ids, the rest as strings."""
        return [
            f"<[{self._token_id(piece)}]>" if number % 2 else json.dumps(piece)
            for number, piece in enumerate(self._split(text))
            if piece
        ]


def _one_of(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"
