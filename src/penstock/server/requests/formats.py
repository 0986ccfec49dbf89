"""Answer formats and histories of requests: tool calls and reasoning, as the served model writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.contract import StructuredOutputsParams
from penstock.server.answers import answer_format
from penstock.server.answers.history import template_messages as messages_for_templates
from penstock.server.options import ServerOptions
from penstock.server.requests.answer import AnswerFormat
from penstock.text.tokenizer import Tokenizer


def choose_format(
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    parallel_tool_calls: bool,
    structured_outputs: StructuredOutputsParams | None,
    options: ServerOptions,
    tokenizer: Tokenizer,
    calls_are_plain: bool = False,
) -> AnswerFormat:
    """Format of the answers of a server with these options.

    calls_are_plain: as in `answer_format`. Raises InvalidParameter.
    """
    return answer_format(
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel_tool_calls,
        structured_outputs=structured_outputs,
        tool_call_parser=options.tool_call_parser,
        enable_auto_tool_choice=options.enable_auto_tool_choice,
        calls_are_plain=calls_are_plain,
        reasoning_parser=options.reasoning_parser,
        reasoning_start_str=options.reasoning_start_str,
        reasoning_end_str=options.reasoning_end_str,
        tokenizer=tokenizer,
    )


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with tool calls, answers of tools and reasoning as templates expect them. Raises InvalidRequest.

    The role `developer` stays: whether the template has it is known later.
    """
    plain = messages_for_templates(messages)
    return [{**one, "role": given["role"]} for one, given in zip(plain, messages, strict=True)]
