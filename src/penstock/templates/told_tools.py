"""Tools, calls and results in plain messages, for chat templates without a variable `tools`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.errors import ChatTemplateError, InvalidRequest

# Writes calls, which are names and arguments as JSON text, as a model does.
WriteCalls: TypeAlias = Callable[[Sequence[tuple[str, str]]], str]
_Messages: TypeAlias = Sequence[Mapping[str, Any]]
_EXAMPLE = ("FUNCTION", '{"PARAMETER": "VALUE"}')


def plain_calls(calls: Sequence[tuple[str, str]]) -> str:
    """Write calls as a JSON list of objects with `name` and `parameters`."""
    written = [f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}' for name, arguments in calls]
    return f"[{', '.join(written)}]"


def has_tool_messages(messages: _Messages) -> bool:
    """Whether messages call tools or have their results."""
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def tools_text(tools: Sequence[Mapping[str, Any]], write_calls: WriteCalls) -> str:
    """Describe tools and the form of calls. tools: in OpenAI's form, nested or flat."""
    functions = [dict(tool["function"] if isinstance(tool.get("function"), Mapping) else tool) for tool in tools]
    listed = "\n".join(
        json.dumps({key: value for key, value in one.items() if key not in ("type", "strict")}, ensure_ascii=False)
        for one in functions
    )
    return (
        f"You can call these functions:\n{listed}\n"
        f"To call functions, answer with nothing but the calls, in this form:\n{write_calls([_EXAMPLE])}"
    )


def plain_history(messages: _Messages, write_calls: WriteCalls) -> _Messages:
    """Return messages whose calls are content, and whose results are messages of the user.

    Results that follow each other, and what the user says behind them, are one message, since many templates want
    roles that alternate.
    """
    plain: list[Mapping[str, Any]] = []
    names: dict[Any, str] = {}
    is_behind_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if message.get("tool_calls"):
            message = _with_written_calls(message, names, write_calls)
        elif is_result:
            name = message.get("name") or names.get(message.get("tool_call_id"))
            content = message.get("content") or ""
            message = {"role": "user", "content": f"Result of {name}: {content}" if name else f"Result: {content}"}
        if is_behind_result and message.get("role") == "user":
            plain[-1] = _joined(plain[-1], "\n", message)
        else:
            plain.append(message)
        is_behind_result = is_result
    return plain


def render_with_told_tools(
    render: Callable[[_Messages], str],
    messages: _Messages,
    tools: Sequence[Mapping[str, Any]],
    write_calls: WriteCalls,
    template_name: str,
) -> str:
    """Render messages with the tools in the system message, or in that of the user if the template shows no other.

    Raises ChatTemplateError as `render`, InvalidRequest for a template that shows neither.
    """
    text = tools_text(tools, write_calls)
    refusal: Exception = InvalidRequest(
        f"There are {len(tools)} tools, but {template_name} has no variable `tools`, and shows no system message or "
        "message of the user that could describe them. Give a chat_template that does."
    )
    for placed in (_in_system(messages, text), _in_user(messages, text)):
        try:
            rendered = render(placed)
        except ChatTemplateError as error:
            # Some templates refuse the role "system".
            refusal = error
            continue
        if text in rendered:
            return rendered
    raise refusal


def _with_written_calls(message: Mapping[str, Any], names: dict[Any, str], write_calls: WriteCalls) -> dict[str, Any]:
    """Return a message with its calls in the content, and note their names by their ids."""
    written: list[tuple[str, str]] = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            name, arguments = str(function.get("name")), function.get("arguments", {})
            names[call.get("id")] = name
            written.append((name, json.dumps(arguments, ensure_ascii=False)))
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return _joined(plain, "\n", {"content": write_calls(written)})


def _joined(first: Mapping[str, Any], separator: str, second: Mapping[str, Any]) -> dict[str, Any]:
    texts = [str(message["content"]) for message in (first, second) if message.get("content")]
    return {**first, "content": separator.join(texts)}


def _in_system(messages: _Messages, text: str) -> _Messages:
    if messages[0].get("role") == "system":
        return [_joined(messages[0], "\n\n", {"content": text}), *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _in_user(messages: _Messages, text: str) -> _Messages:
    first = next((index for index, message in enumerate(messages) if message.get("role") == "user"), None)
    if first is None:
        return [{"role": "user", "content": text}, *messages]
    user = {**messages[first], "content": text}
    return [*messages[:first], _joined(user, "\n\n", messages[first]), *messages[first + 1 :]]
