"""Tool calls with a tag per function and argument, as Qwen3-Coder writes them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidParameter
from penstock.server.answers.call_parser import CallParser, CallSyntax
from penstock.server.answers.markers import Markers
from penstock.server.answers.tool_format import OF_PARAMETERS, CallableTool, tag_of
from penstock.server.requests.answer import AnswerParser

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_SYNTAX = CallSyntax(openers=("<tool_call>", _FUNCTION), closers=("</tool_call>",), skipped=(_FUNCTION,))
_ENDS_OF_TEXT = Markers([f"\n{_PARAMETER_END}", _PARAMETER_END])
_LONGEST_NAME = 1024
# Keywords of an argument that is text, which this form can follow.
_OF_TEXT = {"type", "title", "description", "default", "examples"}


@dataclass(frozen=True, slots=True)
class XMLFormat:
    """Format of calls whose arguments are tags: texts as they are, other values as JSON."""

    @property
    def markers(self) -> Collection[str]:
        return _SYNTAX.markers

    def calls(self, tools: Sequence[CallableTool], *, parallel: bool) -> dict[str, Any]:
        return {
            "type": "tags_with_separator",
            "tags": [_tag(tool) for tool in tools],
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": not parallel,
        }

    def free_text_with_calls(self, tools: Sequence[CallableTool], *, parallel: bool) -> dict[str, Any]:
        return {
            "type": "triggered_tags",
            "triggers": ["<tool_call>"],
            "tags": [_tag(tool) for tool in tools],
            "stop_after_first": not parallel,
        }

    def parser(self, tools: Sequence[CallableTool], *, parallel: bool) -> AnswerParser:
        return XMLCallParser(tools, parallel=parallel)

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        return "\n".join(
            f"<tool_call>\n{_FUNCTION}{name}>\n{_written(arguments)}{_FUNCTION_END}\n</tool_call>"
            for name, arguments in calls
        )


def _written(arguments: str) -> str:
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in json.loads(arguments).items()
    }
    return "".join(f"{_PARAMETER}{name}>\n{text}\n{_PARAMETER_END}\n" for name, text in texts.items())


def _tag(tool: CallableTool) -> dict[str, Any]:
    return tag_of(tool, f"<tool_call>\n{_FUNCTION}{tool.name}>\n", _arguments, f"{_FUNCTION_END}\n</tool_call>")


def _arguments(tool: CallableTool) -> dict[str, Any]:
    """Format of a call's arguments, in the order of the schema; any text for a schema of any object."""
    _check(tool.name, "parameters", tool.parameters, OF_PARAMETERS)
    if "properties" not in tool.parameters:
        return {"type": "any_text"}
    required = tool.parameters.get("required", [])
    shared = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
    elements = [
        _argument(tool.name, name, schema, shared, is_required=name in required)
        for name, schema in tool.parameters["properties"].items()
    ]
    return {"type": "sequence", "elements": elements} if elements else {"type": "const_string", "value": ""}


def _argument(tool: str, name: str, schema: Any, shared: Mapping[str, Any], *, is_required: bool) -> dict[str, Any]:
    content: dict[str, Any]
    texts = _fixed_texts(schema)
    if texts is not None:
        content = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
    elif _is_text(schema):
        _check(tool, f"parameters.properties.{name}", schema, _OF_TEXT)
        content = {"type": "any_text"}
    else:
        content = {"type": "json_schema", "json_schema": {**shared, **schema} if isinstance(schema, dict) else schema}
    begin, end = f"{_PARAMETER}{name}>\n", f"\n{_PARAMETER_END}\n"
    tag = {"type": "tag", "begin": begin, "content": content, "end": end}
    return tag if is_required else {"type": "or", "elements": [tag, {"type": "const_string", "value": ""}]}


def _check(tool: str, place: str, schema: Mapping[str, Any], known: Collection[str]) -> None:
    for keyword in schema:
        if keyword not in known:
            raise InvalidParameter(
                f"The tool {tool!r} has {keyword} in {place}, which tool_call_parser=qwen3_coder cannot enforce: its "
                f"arguments are tags, not JSON. Allowed: {', '.join(sorted(known))}."
            )


def _is_text(schema: Any) -> bool:
    """Whether an argument is written as it is, and not as JSON."""
    return isinstance(schema, Mapping) and (schema.get("type") == "string" or _fixed_texts(schema) is not None)


def _fixed_texts(schema: Any) -> list[str] | None:
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else None


class XMLCallParser(CallParser):
    """Parser of one answer in this form. Arguments become JSON: texts by the schema, other values as they are."""

    def __init__(self, tools: Sequence[CallableTool], *, parallel: bool) -> None:
        super().__init__(_SYNTAX, [tool.name for tool in tools], parallel=parallel)
        self._properties = {tool.name: tool.parameters.get("properties", {}) for tool in tools}
        self._num_arguments = 0
        self._is_text = False
        self._is_first_piece = True

    def _on_marker(self, marker: str) -> None:
        if marker == _FUNCTION:
            self._has_begun = False
            self._state = self._function

    def _function(self) -> bool:
        name = self._tag_name()
        if name is None:
            return False
        if not name:
            return self._fail()
        self._name, self._num_arguments = name, 0
        self._begin(name)
        self._emit_arguments("{")
        self._state = self._before_argument
        return True

    def _tag_name(self) -> str | None:
        """Take a name and its closing bracket; "" for what is no name, None if more must come."""
        name, bracket, _ = self._pending.partition(">")
        if not name.strip() or len(name) > _LONGEST_NAME or any(char in "<\n" for char in name):
            return "" if name or bracket else None
        if not bracket:
            return None
        self._take(len(name) + 1)
        return name.strip()

    def _before_argument(self) -> bool:
        self._skip_blanks("")
        if self._pending.startswith(_FUNCTION_END):
            self._take(len(_FUNCTION_END))
            self._emit_arguments("}")
            return self._end_call()
        if self._pending.startswith(_PARAMETER):
            self._take(len(_PARAMETER))
            self._state = self._argument_name
            return True
        if not self._is_at_end and (_FUNCTION_END.startswith(self._pending) or _PARAMETER.startswith(self._pending)):
            return False
        return self._fail()

    def _argument_name(self) -> bool:
        name = self._tag_name()
        if name is None:
            return False
        if not name:
            return self._fail()
        self._emit_arguments(f"{', ' if self._num_arguments else ''}{json.dumps(name, ensure_ascii=False)}: ")
        self._num_arguments += 1
        self._is_text = _is_text(self._properties.get(self._name, {}).get(name))
        self._is_first_piece = True
        self._state = self._argument
        return True

    def _argument(self) -> bool:
        """Take a value up to its end: texts as they come, others at once."""
        end = self._pending.find(_PARAMETER_END)
        if self._is_text and self._is_first_piece and end and len(self._pending) > 1:
            self._take(self._pending.startswith("\n"))
            self._emit_arguments('"')
            self._is_first_piece = False
            return True
        if end >= 0:
            self._end_argument(self._pending[:end].removesuffix("\n"))
            self._take(end + len(_PARAMETER_END))
            self._state = self._before_argument
            return True
        if self._is_text and not self._is_first_piece:
            free = self._pending[: len(self._pending) - _ENDS_OF_TEXT.num_kept(self._pending)]
            self._emit_arguments(_escaped(free))
            self._take(len(free))
        return False

    def _end_argument(self, value: str) -> None:
        if not self._is_text:
            self._emit_arguments(_as_json(value.strip()))
        else:
            self._emit_arguments(f'{chr(34) if self._is_first_piece else ""}{_escaped(value)}"')


def _escaped(text: str) -> str:
    """Characters of a text within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """Return JSON as it is, constants of Python as those of JSON, and other text as a string."""
    constants = {"True": "true", "False": "false", "None": "null"}
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return constants.get(text) or json.dumps(text, ensure_ascii=False)
    return text
