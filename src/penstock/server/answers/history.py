"""Messages of a chat request as templates read them, where clients write one thing in several ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.contract.param_checks import shown
from penstock.errors import InvalidRequest

# Names of a message's reasoning: that of newer clients, and that of older ones.
_REASONING = ("reasoning", "reasoning_content")


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect; the engine parses the arguments of their calls.

    The role "developer" becomes "system". Reasoning is under both of its names. Calls have a type, and a message of
    role "tool" has the name of the function whose call it answers.

    Raises InvalidRequest for calls or answers of tools without what templates need of them.
    """
    names: dict[str, str] = {}
    return [_message(message, f"messages[{index}]", names) for index, message in enumerate(messages)]


def _message(message: Any, at: str, names: dict[str, str]) -> dict[str, Any]:
    """names: functions by the ids of earlier calls, to which those of this message are added."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{at} is {shown(message)}. Allowed: a dictionary with role and content.")
    plain = {name: value for name, value in message.items() if value is not None}
    if plain.get("role") == "developer":
        plain["role"] = "system"
    reasoning = next((plain[name] for name in _REASONING if plain.get(name)), None)
    for name in _REASONING:
        plain.pop(name, None)
    if reasoning is not None:
        plain |= dict.fromkeys(_REASONING, reasoning)
    calls = plain.pop("tool_calls", None)
    if calls:
        plain["tool_calls"] = _calls(calls, f"{at}.tool_calls", names)
    if plain.get("role") == "tool":
        _add_name(plain, at, names)
    return plain


def _calls(calls: Any, at: str, names: dict[str, str]) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequest(f"{at}={shown(calls)} is not valid. Allowed: a list of calls.")
    plain = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise InvalidRequest(
                f"{at}[{index}]={shown(call)} is not valid. Allowed: a call of type function, with function.name and "
                "function.arguments."
            )
        if isinstance(call.get("id"), str):
            names[call["id"]] = name
        plain.append({"type": "function", **call})
    return plain


def _add_name(message: dict[str, Any], at: str, names: Mapping[str, str]) -> None:
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str):
        raise InvalidRequest(f"{at}.tool_call_id={shown(call_id)} is not valid. Allowed: the id of an earlier call.")
    if call_id in names:
        message.setdefault("name", names[call_id])
