"""Knowledge of tools that a chat template has, asked of the template itself."""

from __future__ import annotations

from enum import Enum

from penstock.errors import ChatTemplateError
from penstock.server.answers.tool_parsers import JSON_LIST
from penstock.text.tokenizer import Tokenizer

_NAME, _ARGUMENTS = "look_up", {"word": "fox"}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}
_QUESTION = {"role": "user", "content": "fox"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


class TemplateTools(Enum):
    """Form in which a model sees tools. NONE: its template shows none, so that messages tell them (`told_tools`).

    PLAIN: the template writes calls as a plain JSON list. OWN: it writes them otherwise.
    """

    NONE = "none"
    PLAIN = "plain"
    OWN = "own"


def template_tools(tokenizer: Tokenizer, chat_template: str | None) -> TemplateTools:
    """Knowledge of the model's chat template, or of another one. Raises InvalidRequest without a template."""
    if not tokenizer.knows_tools(chat_template):
        return TemplateTools.NONE
    try:
        before = tokenizer.apply_chat_template([_QUESTION], chat_template=chat_template, tools=[_TOOL])
        text = tokenizer.apply_chat_template(
            [_QUESTION, _CALLING], chat_template=chat_template, tools=[_TOOL], add_generation_prompt=False
        )
    except ChatTemplateError:
        return TemplateTools.OWN
    written = JSON_LIST.written([(_NAME, '{"word": "fox"}')])
    is_plain = text.startswith(before) and text[len(before) :].lstrip().startswith(written)
    return TemplateTools.PLAIN if is_plain else TemplateTools.OWN
