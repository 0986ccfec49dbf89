"""Tool calls as a list of Python calls, as Llama 3.2 and Llama 4 write them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidParameter
from penstock.server.answers.call_parser import CallParser, CallSyntax
from penstock.server.answers.python_literal import LiteralScanner
from penstock.server.answers.tool_format import OF_PARAMETERS, CallableTool, tag_of
from penstock.server.requests.answer import AnswerParser

_SYNTAX = CallSyntax(openers=("<|python_start|>",), closers=("<|python_end|>",), starts="[", bare_names=True)
_NAME = r"""[^\s=(),:\[\]{}"']{1,256}"""
_ARGUMENT = re.compile(rf"({_NAME})\s*=\s*(?=[^\s=),])")
_PART_OF_ARGUMENT = re.compile(rf"{_NAME}\s*(=\s*)?")
_EMPTY = {"type": "const_string", "value": ""}


@dataclass(frozen=True, slots=True)
class PythonicFormat:
    """Format of calls `[f(a=1), g(b="x")]`, in which lists, dictionaries and constants may be those of JSON, too."""

    @property
    def markers(self) -> Collection[str]:
        return _SYNTAX.markers

    def calls(self, tools: Sequence[CallableTool], *, parallel: bool) -> dict[str, Any]:
        listed = {
            "type": "tags_with_separator",
            "tags": [tag_of(tool, f"{tool.name}(", _arguments, ")") for tool in tools],
            "separator": ", ",
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        return {"type": "tag", "begin": "[", "content": listed, "end": "]"}

    def free_text_with_calls(self, tools: Sequence[CallableTool], *, parallel: bool) -> dict[str, Any]:
        # The text is either calls or does not begin as they do.
        other = {"type": "regex", "pattern": r"(\s*[^\s\[](.|\n)*)?"}
        return {"type": "or", "elements": [self.calls(tools, parallel=parallel), other]}

    def parser(self, tools: Sequence[CallableTool], *, parallel: bool) -> AnswerParser:
        return PythonicCallParser(_SYNTAX, {tool.name for tool in tools}, parallel=parallel)

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in json.loads(arguments).items())})"
            for name, arguments in calls
        ]
        return f"[{', '.join(texts)}]"


def _arguments(tool: CallableTool) -> dict[str, Any]:
    """Format of a call's arguments: required ones, then others, each in the order of the schema."""
    parameters = tool.parameters
    for keyword in parameters:
        if keyword not in OF_PARAMETERS:
            raise _not_enforced(tool, keyword, OF_PARAMETERS)
    if "properties" not in parameters:
        return {"type": "any_text"}
    properties, required = parameters["properties"], parameters.get("required", [])
    for name in properties:
        if not re.fullmatch(_NAME, name):
            raise _not_enforced(tool, f"the property {name!r}", ["names without blanks, quotes, brackets and =,:"])
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    values = {name: _value(schema, shared) for name, schema in properties.items()}
    first = [name for name in values if name in required]
    others = [name for name in values if name not in required]
    if first:
        elements = [_argument(name, values, is_first=name == first[0]) for name in first]
        return {"type": "sequence", "elements": [*elements, *_optional(others, values)]}
    # The first argument, which has no comma before it, is any of them.
    alternatives: list[dict[str, Any]] = [
        {"type": "sequence", "elements": [_argument(name, values, is_first=True), *_optional(others[index:], values)]}
        for index, name in enumerate(others, start=1)
    ]
    return {"type": "or", "elements": [*alternatives, _EMPTY]} if alternatives else _EMPTY


def _argument(name: str, values: Mapping[str, dict[str, Any]], *, is_first: bool) -> dict[str, Any]:
    return {"type": "tag", "begin": f"{'' if is_first else ', '}{name}=", "content": values[name], "end": ""}


def _optional(names: Sequence[str], values: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "or", "elements": [_argument(name, values, is_first=False), _EMPTY]} for name in names]


def _value(schema: Any, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Format of a value: JSON, whose texts and numbers are those of Python, but for constants of Python."""
    constants = {"boolean": ("True", "False"), "null": ("None",)}.get(_only_type(schema))
    if constants is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in constants]}
    return {"type": "json_schema", "json_schema": {**shared, **schema} if isinstance(schema, dict) else schema}


def _only_type(schema: Any) -> str:
    """Type of a schema that says nothing else."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    is_plain = isinstance(schema, Mapping) and schema.keys() <= {"type", "title", "description", "default"}
    return kind if is_plain and isinstance(kind, str) else ""


def _not_enforced(tool: CallableTool, what: str, allowed: Collection[str]) -> InvalidParameter:
    return InvalidParameter(
        f"The tool {tool.name!r} has {what} in parameters, which tool_call_parser=pythonic cannot enforce: its "
        f"arguments are those of a Python call. Allowed: {', '.join(sorted(allowed))}."
    )


class PythonicCallParser(CallParser):
    """Parser of one answer with calls in Python, whose arguments become JSON."""

    _num_arguments = 0
    _literal: LiteralScanner

    def _between(self) -> bool:
        went_on = super()._between()
        # Names behind the list are content.
        if self._state == self._between and self._num_in_section and self._candidate.endswith("]"):
            return self._end_section()
        return went_on

    def _before_arguments(self) -> bool:
        self._skip_blanks("")
        if not self._pending:
            return False
        if self._pending[0] != "(" or (self._needs_known_name and self._name not in self._names):
            return self._fail()
        self._take(1)
        self._num_arguments = 0
        self._state = self._before_argument
        return True

    def _before_argument(self) -> bool:
        """Begin an argument, or end the call. A call begins once it is certain that it is one."""
        self._skip_blanks("," if self._num_arguments else "")
        if not self._pending:
            return False
        found = _ARGUMENT.match(self._pending)
        is_end = self._pending[0] == ")"
        if found is None and not is_end:
            is_open = not self._is_at_end and _PART_OF_ARGUMENT.fullmatch(self._pending)
            return False if is_open else self._fail()
        if not self._num_arguments:
            self._begin(self._name)
            self._emit_arguments("{")
        if found is None:
            self._take(1)
            self._emit_arguments("}")
            return self._end_call()
        self._emit_arguments(f"{', ' if self._num_arguments else ''}{json.dumps(found[1], ensure_ascii=False)}: ")
        self._take(found.end())
        self._num_arguments += 1
        self._literal = LiteralScanner()
        self._state = self._argument
        return True

    def _argument(self) -> bool:
        end = self._literal.scan(self._pending, 0)
        self._emit_arguments(self._literal.take())
        self._take(end)
        if self._literal.done:
            self._state = self._before_argument
        return self._literal.done
