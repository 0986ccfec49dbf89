"""Answer formats and histories of requests: tool calls and reasoning, as the served model writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.contract import StructuredOutputsParams
from penstock.server.answers import answer_format
from penstock.server.answers.history import template_messages as messages_for_templates
from penstock.server.answers.template_tools import TemplateTools
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
    shown: TemplateTools | None = None,
) -> AnswerFormat:
    """Format of the answers of a server with these options.

    shown: tools of the prompt, whose form of calls counts where the options name no parser. Raises InvalidParameter.
    """
    parser, may_choose = options.tool_call_parser, options.enable_auto_tool_choice
    if parser is None and shown is not None:
        parser, may_choose = shown.parser, shown.has_known_calls
    return answer_format(
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel_tool_calls,
        structured_outputs=structured_outputs,
        tool_call_parser=parser,
        enable_auto_tool_choice=may_choose,
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
