"""Choice of a request's answer format: tool calls and reasoning, as the served model writes them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.contract import StructuredOutputsParams
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import UnsupportedParameter
from penstock.server.answer import AnswerFormat, PlainAnswer
from penstock.server.options import ServerOptions

_PARSERS = "penstock.server.answers"
_HISTORY = "penstock.server.answers.history"


def choose_format(
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    parallel_tool_calls: bool,
    structured_outputs: StructuredOutputsParams | None,
    options: ServerOptions,
    tokenizer: Tokenizer,
) -> AnswerFormat:
    """Format of the answers. Raises InvalidRequest for tools that the server's options cannot serve."""
    try:
        parsers = importlib.import_module(_PARSERS)
    except ModuleNotFoundError:
        if tools and tool_choice != "none":
            message = "tools needs parsers of tool calls, which this server does not have."
            raise UnsupportedParameter(message) from None
        return PlainAnswer(structured_outputs)
    chosen: AnswerFormat = parsers.answer_format(
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel_tool_calls,
        structured_outputs=structured_outputs,
        tool_call_parser=options.tool_call_parser,
        enable_auto_tool_choice=options.enable_auto_tool_choice,
        reasoning_parser=options.reasoning_parser,
        reasoning_start_str=options.reasoning_start_str,
        reasoning_end_str=options.reasoning_end_str,
        tokenizer=tokenizer,
    )
    return chosen


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with tool calls, answers of tools and reasoning as templates expect them. Raises InvalidRequest."""
    try:
        history = importlib.import_module(_HISTORY)
    except ModuleNotFoundError:
        return [dict(message) for message in messages]
    plain: list[dict[str, Any]] = history.template_messages(messages)
    # Whether the template has the role `developer` is known later.
    return [{**one, "role": given["role"]} for one, given in zip(plain, messages, strict=True)]
