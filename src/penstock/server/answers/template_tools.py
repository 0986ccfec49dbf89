"""Knowledge of tools that a chat template has, asked of the template itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from penstock.config.reasoning import HARMONY as REASONING_IN_HARMONY
from penstock.errors import ChatTemplateError
from penstock.server.answers.harmony import HARMONY, HarmonyParser
from penstock.server.answers.tool_format import CallableTool, ToolCallFormat
from penstock.server.answers.tool_parsers import tool_call_format, tool_parser_names
from penstock.server.requests.answer import AnswerParser, PlainAnswer
from penstock.server.requests.samples import Answer
from penstock.structured.harmony_messages import ROLE, START
from penstock.text.tokenizer import Tokenizer

_NAME, _ARGUMENTS = "look_up", {"word": "fox"}
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": _SCHEMA}}
_QUESTION = {"role": "user", "content": "fox"}
# Templates of Mistral take ids of nine letters and digits.
_CALL = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


@dataclass(frozen=True, slots=True)
class TemplateTools:
    """Tools of a prompt. are_told: whether messages tell them (`told_tools`), since the template shows none.

    has_known_calls: whether the prompt shows a known form of calls. parser: that which reads it, None for a plain list.
    """

    are_told: bool
    has_known_calls: bool
    parser: str | None = None


def template_tools(
    tokenizer: Tokenizer, chat_template: str | None, reasoning_parser: str | None = None
) -> TemplateTools:
    """Knowledge of the model's chat template, or of another one. Raises InvalidRequest without a template.

    reasoning_parser: of the server. Calls in harmony messages are known where it reads those.
    """
    are_told = not tokenizer.knows_tools(chat_template)
    text = _written_call(tokenizer, chat_template)
    formats = [(name, tool_call_format(name, tokenizer)) for name in (None, *tool_parser_names())]
    read = [
        (name, format)
        for name, format in formats
        if (format is not HARMONY or reasoning_parser == REASONING_IN_HARMONY) and _reads(format, text)
    ]
    # Of parsers that write it so, too, that of the longest text.
    written = {name: format.written([(_NAME, json.dumps(_ARGUMENTS))]) for name, format in read}
    read.sort(key=lambda one: len(written[one[0]]) if written[one[0]] in text else 0, reverse=True)
    if read:
        return TemplateTools(are_told, has_known_calls=True, parser=read[0][0])
    return TemplateTools(are_told, has_known_calls=are_told)


def _written_call(tokenizer: Tokenizer, chat_template: str | None) -> str:
    """Text that the template makes of a call; empty if it refuses one."""

    def render(*messages: dict[str, Any], begins_answer: bool) -> str:
        return tokenizer.apply_chat_template(
            messages, chat_template=chat_template, tools=[_TOOL], add_generation_prompt=begins_answer
        )

    try:
        text = render(_QUESTION, _CALLING, begins_answer=False)
        # Some templates begin answers with more than their role, such as a marker of reasoning.
        for before in (render(_QUESTION, begins_answer=True), render(_QUESTION, begins_answer=False)):
            if text.startswith(before):
                return text[len(before) :].lstrip()
    except ChatTemplateError:
        pass
    return ""


def _reads(format: ToolCallFormat, text: str) -> bool:
    """Whether a parser finds the call."""
    if format is HARMONY:
        parser: AnswerParser = HarmonyParser(
            PlainAnswer().parser([]), takes_calls=True, parallel=True, opened=f"{START}{ROLE}"
        )
    else:
        parser = format.parser([CallableTool(_NAME, _SCHEMA)], parallel=True)
    calls = Answer.of([*parser.push(text), *parser.finish()]).tool_calls
    try:
        return [(call.name, json.loads(call.arguments)) for call in calls] == [(_NAME, _ARGUMENTS)]
    except ValueError:
        return False
