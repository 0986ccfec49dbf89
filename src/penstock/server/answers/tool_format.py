"""Formats of tool calls in a model's text: as data for one parser and one constraint."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import InvalidParameter
from penstock.server.answers.call_parser import CallParser, CallSyntax
from penstock.server.requests.answer import AnswerParser

_NAME = "{name}"


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A function that an answer may call.

    parameters: JSON schema of its arguments. must_be_valid: False if a constraint may leave arguments free where it
    cannot enforce their schema.
    """

    name: str
    parameters: Mapping[str, Any]
    must_be_valid: bool = True


# Keywords of a function's parameters that separate arguments can follow.
OF_PARAMETERS = frozenset(
    [
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "$schema",
        "title",
        "description",
    ]
)


def tag_of(
    tool: CallableTool, begin: str, arguments: Callable[[CallableTool], dict[str, Any]], end: str
) -> dict[str, Any]:
    """Format of one call. arguments: their format, which raises InvalidParameter where it cannot enforce the schema."""
    try:
        content = arguments(tool)
    except InvalidParameter:
        if tool.must_be_valid:
            raise
        content = {"type": "any_text"}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


class ToolCallFormat(Protocol):
    """Interface of a tool parser: the form of tool calls in the text of one family of models.

    markers: texts that the parser looks for. Where they are special tokens, the text keeps those.
    """

    @property
    def markers(self) -> Collection[str]: ...

    def calls(self, tools: Sequence[CallableTool], *, parallel: bool) -> dict[str, Any]:
        """Format of a structural tag for text that is only calls: at least one, and one at most unless `parallel`."""

    def free_text_with_calls(self, tools: Sequence[CallableTool], *, parallel: bool) -> dict[str, Any]:
        """Format of a structural tag for free text in which every call is valid."""

    def parser(self, tools: Sequence[CallableTool], *, parallel: bool) -> AnswerParser:
        """Parser of one answer. Without `parallel`, it drops calls after the first."""

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, which are names and arguments as JSON text, as the model writes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat(CallSyntax):
    """Format of tool calls whose arguments are JSON text.

    Written is `begin`, calls with `separator` between them, and `end`. A call is `head`, which has the function's name
    in place of `{name}`, its arguments, and `tail`. What is read is the `CallSyntax`, since models vary.
    """

    head: str
    tail: str
    begin: str = ""
    separator: str = ""
    end: str = ""

    def calls(self, tools: Sequence[CallableTool], *, parallel: bool) -> dict[str, Any]:
        listed = self._tags(tools, parallel=parallel)
        if not self.begin and not self.end:
            return listed
        return {"type": "tag", "begin": self.begin, "content": listed, "end": self.end}

    def free_text_with_calls(self, tools: Sequence[CallableTool], *, parallel: bool) -> dict[str, Any]:
        written = self.begin or self.head
        trigger = next((opener for opener in self.openers if written.startswith(opener)), None)
        if trigger is None:
            # The text is either calls or does not begin as they do.
            other = {"type": "regex", "pattern": rf"(\s*[^\s{re.escape(self.starts)}](.|\n)*)?"}
            return {"type": "or", "elements": [self.calls(tools, parallel=parallel), other]}
        is_section = bool(self.begin)
        tags = [self.calls(tools, parallel=parallel)] if is_section else [self._tag(tool) for tool in tools]
        return {
            "type": "triggered_tags",
            "triggers": [trigger],
            "tags": tags,
            "stop_after_first": is_section or not parallel,
        }

    def parser(self, tools: Sequence[CallableTool], *, parallel: bool) -> AnswerParser:
        return CallParser(self, {tool.name for tool in tools}, parallel=parallel)

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = [f"{self.head.replace(_NAME, name)}{arguments}{self.tail}" for name, arguments in calls]
        return f"{self.begin}{self.separator.join(texts)}{self.end}"

    def _tags(self, tools: Sequence[CallableTool], *, parallel: bool) -> dict[str, Any]:
        return {
            "type": "tags_with_separator",
            "tags": [self._tag(tool) for tool in tools],
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }

    def _tag(self, tool: CallableTool) -> dict[str, Any]:
        content = {"type": "json_schema", "json_schema": dict(tool.parameters)}
        return {"type": "tag", "begin": self.head.replace(_NAME, tool.name), "content": content, "end": self.tail}
