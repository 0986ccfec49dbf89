"""Answers of chat requests: tool calls and reasoning, as constraints of the sampled text and parsers of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.contract import StructuredOutputsParams
    from penstock.server.requests.answer import AnswerFormat
    from penstock.text.tokenizer import Tokenizer


def answer_format(
    *,
    tools: Any,
    tool_choice: Any,
    parallel_tool_calls: bool | None,
    structured_outputs: StructuredOutputsParams | None,
    tool_call_parser: str | None,
    enable_auto_tool_choice: bool,
    reasoning_parser: str | None,
    tokenizer: Tokenizer,
    reasoning_start_str: str = "<think>",
    reasoning_end_str: str = "</think>",
) -> AnswerFormat:
    """Return the format of the answers to a request.

    tools, tool_choice, parallel_tool_calls: as in OpenAI's requests; None where a request has none.
    tool_call_parser: name of the parser of calls, None for a plain JSON list.
    enable_auto_tool_choice: whether the model may decide on calls.
    structured_outputs: constraint of the content, which answers without calls have.
    reasoning_start_str, reasoning_end_str: markers of the reasoning parser "custom".

    Raises InvalidParameter.
    """
    from penstock.server.answers.chat_answer import chat_answer

    return chat_answer(
        tools=tools,
        tool_choice=tool_choice,
        parallel=parallel_tool_calls is not False,
        structured_outputs=structured_outputs,
        tool_call_parser=tool_call_parser,
        enable_auto_tool_choice=enable_auto_tool_choice,
        reasoning_parser=reasoning_parser,
        reasoning_strings=(reasoning_start_str, reasoning_end_str),
        tokenizer=tokenizer,
    )
