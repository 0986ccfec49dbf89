"""Tools and tool choice of a request: checked, as the functions that its answer may or must call."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from penstock.contract.param_checks import shown
from penstock.errors import InvalidParameter
from penstock.server.answers.tool_format import CallableTool
from penstock.structured.schema_check import NotEnforced, enforceable

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_NAMES = "1 to 128 letters, digits, underscores, dashes and dots"
_CHOICES = (
    '"auto", "none", "required", {"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools", '
    '"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
)


class Mode(Enum):
    """Whether an answer may or must have calls."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Choice of tools. tools: those that the answer may call. is_one_call: whether the choice names the only call.

    is_constrained: whether calls must be valid.
    """

    mode: Mode
    tools: tuple[CallableTool, ...] = ()
    is_one_call: bool = False
    is_constrained: bool = False


@dataclass(frozen=True, slots=True)
class _Tool:
    """A tool of a request. at: its parameters' place in the request, for errors."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool
    at: str

    def checked(self) -> CallableTool:
        """Return the tool with the schema that its calls follow. Raises InvalidParameter if it cannot be enforced."""
        refusal = _refusal(json.dumps(self.parameters))
        if refusal is not None:
            raise InvalidParameter(refusal.replace("structured_outputs.json", self.at, 1))
        return CallableTool(self.name, self.parameters)

    def lenient(self) -> CallableTool:
        """Return the tool with any object as arguments where its schema cannot be enforced, unless it is strict."""
        if self.is_strict:
            return self.checked()
        can_be_enforced = _refusal(json.dumps(self.parameters)) is None
        return CallableTool(self.name, self.parameters if can_be_enforced else {"type": "object"}, must_be_valid=False)


def read_tool_choice(tools: Any, tool_choice: Any) -> ToolChoice:
    """Read `tools` and `tool_choice` in OpenAI's form, nested as in chat or flat as in responses.

    A choice of None is "auto" with tools and "none" without. Raises InvalidParameter.
    """
    known = _tools(tools)
    if tool_choice is None:
        tool_choice = "auto" if known else "none"
    if tool_choice == "none":
        return ToolChoice(Mode.NONE)
    if not known:
        raise InvalidParameter(f"tool_choice={shown(tool_choice)} needs tools, of which there are none. Give tools.")
    if tool_choice == "required":
        return _required(known.values())
    if tool_choice == "auto":
        return _auto(known.values(), is_subset=False)
    kind = tool_choice.get("type") if isinstance(tool_choice, Mapping) else None
    if kind == "function":
        return _required([_chosen(tool_choice, known, "tool_choice")], is_one_call=True)
    if kind == "allowed_tools":
        return _allowed(tool_choice, known)
    raise InvalidParameter(f"tool_choice={shown(tool_choice)} is not valid. Allowed: {_CHOICES}.")


def _required(tools: Any, *, is_one_call: bool = False) -> ToolChoice:
    return ToolChoice(Mode.REQUIRED, tuple(tool.checked() for tool in tools), is_one_call, is_constrained=True)


def _auto(tools: Any, *, is_subset: bool) -> ToolChoice:
    listed = list(tools)
    if is_subset or any(tool.is_strict for tool in listed):
        return ToolChoice(Mode.AUTO, tuple(tool.lenient() for tool in listed), is_constrained=True)
    return ToolChoice(Mode.AUTO, tuple(CallableTool(tool.name, tool.parameters) for tool in listed))


def _allowed(tool_choice: Mapping[str, Any], known: Mapping[str, _Tool]) -> ToolChoice:
    at, allowed = "tool_choice.allowed_tools", tool_choice.get("allowed_tools", tool_choice)
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    names = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required"):
        raise InvalidParameter(
            f'tool_choice.allowed_tools.mode={shown(mode)} is not valid. Allowed: "auto", "required".'
        )
    if not isinstance(names, Sequence) or isinstance(names, str) or not names:
        raise InvalidParameter(
            f"tool_choice.allowed_tools.tools={shown(names)} is not valid. Allowed: a list of tools."
        )
    chosen = [_chosen(item, known, f"{at}.tools[{index}]") for index, item in enumerate(names)]
    tools = {tool.name: tool for tool in chosen}.values()
    return _required(tools) if mode == "required" else _auto(tools, is_subset=len(tools) < len(known))


def _chosen(item: Any, known: Mapping[str, _Tool], at: str) -> _Tool:
    function = item.get("function", item) if isinstance(item, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in known:
        raise InvalidParameter(
            f"{at} names the function {shown(name)}, which is not in tools. Allowed: {', '.join(known)}."
        )
    return known[name]


def _tools(tools: Any) -> dict[str, _Tool]:
    if tools is None:
        return {}
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidParameter(f"tools={shown(tools)} is not valid. Allowed: a list of functions.")
    known: dict[str, _Tool] = {}
    for index, item in enumerate(tools):
        tool = _tool(item, f"tools[{index}]")
        if tool.name in known:
            raise InvalidParameter(
                f"tools[{index}] has the name {tool.name!r} of another tool. Allowed: each name once."
            )
        known[tool.name] = tool
    return known


def _tool(item: Any, at: str) -> _Tool:
    if not isinstance(item, Mapping) or item.get("type") != "function":
        raise InvalidParameter(
            f'{at}={shown(item)} is not valid. Allowed: {{"type": "function", "function": {{"name": ...}}}}.'
        )
    at, function = (f"{at}.function", item["function"]) if "function" in item else (at, item)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter(f"{at}.name={shown(name)} is not valid. Allowed: {_NAMES}.")
    is_strict = function.get("strict")
    if is_strict not in (None, True, False):
        raise InvalidParameter(f"{at}.strict={shown(is_strict)} is not valid. Allowed: true, false.")
    return _Tool(name, _parameters(function.get("parameters"), f"{at}.parameters"), bool(is_strict), f"{at}.parameters")


def _parameters(given: Any, at: str) -> dict[str, Any]:
    """Return a schema of objects. A tool without parameters has no arguments."""
    parameters = {"properties": {}} if given is None else given
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidParameter(f'{at}={shown(given)} is not valid. Allowed: a JSON schema of type "object".')
    return {"type": "object", **parameters}


@functools.lru_cache(maxsize=1024)
def _refusal(schema: str) -> str | None:
    """Error of a schema that cannot be enforced. Cached, since conversations repeat their tools."""
    try:
        enforceable(json.loads(schema))
    except NotEnforced as error:
        return str(error)
    return None
