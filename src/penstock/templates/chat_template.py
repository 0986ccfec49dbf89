"""Chat templates: conversations as text, equal to Transformers' `apply_chat_template`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import msgspec

from penstock.checkpoints.shown_model import shown_model
from penstock.contract.param_checks import check_sendable, shown
from penstock.errors import ChatTemplateError, InvalidParameter, InvalidRequest
from penstock.templates.content_format import AUTO, STRING, in_content_format
from penstock.templates.files import ModelTemplates
from penstock.templates.renderer import TemplateRenderer
from penstock.templates.told_tools import (
    WriteCalls,
    has_tool_messages,
    plain_calls,
    plain_history,
    render_with_told_tools,
)

logger = logging.getLogger(__name__)
# Endings of files that `chat_template` may name as text; a request must not be able to read others.
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")
_LONGEST_TEMPLATE = 4_000_000
# Keys of a message's reasoning in templates, by precedence.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# In gpt-oss templates, which take the content or the reasoning of a message with calls, as its reasoning, but not both.
_TAKES_ONE_TEXT = "message.content and message.thinking"
# In templates that show calls, though some of these have no variable `tools`.
_KNOWS_CALLS = "tool_calls"
# Marks where the last message ends in the text; the space shows whether the template strips messages.
_END_MARK = "penstock-ends-the-last-message-here "


class ChatTemplate(NamedTuple):
    """Jinja text of a template, and its name for errors."""

    source: str
    name: str


def plain_data(name: str, value: Any) -> Any:
    """Convert a value to JSON data: dictionaries, lists, texts, numbers. name: for errors.

    Objects of pydantic, such as the messages of OpenAI's client, dataclasses and arrays are converted.
    Raises InvalidRequest for any other object, and for data that cannot be serialised.
    """
    try:
        plain = msgspec.to_builtins(value, enc_hook=_as_builtin)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{name} cannot be given to a chat template: {error}. Allowed: dictionaries, lists, texts and numbers."
        ) from None
    check_sendable({name: plain})
    return plain


def choose_template(
    templates: ModelTemplates, folder: Path, given: str | Path | None, tools: Sequence[Any] | None
) -> ChatTemplate:
    """Choose the template of a conversation.

    given: None for the model's own; a template's text, the name of one of the model's, or a file: a path,
        or text that ends with one of TEMPLATE_SUFFIXES.

    Raises InvalidRequest without a template.
    """
    own = templates.own
    if given is None:
        if not own:
            raise InvalidRequest(
                f"The tokenizer of {shown_model(folder)} has no chat template, so it cannot render messages. "
                "Give chat_template, or a plain prompt."
            )
        return ChatTemplate(_own_template(templates, folder, tools), f"The chat template of {shown_model(folder)}")
    if isinstance(given, Path):
        return _from_file(given)
    if not isinstance(given, str):
        raise InvalidParameter(
            f"chat_template={shown(given)} is a {type(given).__name__}. Allowed: text of a Jinja template, or a Path."
        )
    if isinstance(own, Mapping) and isinstance(own.get(given), str):
        return ChatTemplate(own[given], f"The chat template {given!r} of {shown_model(folder)}")
    if "{" in given:
        if len(given) > _LONGEST_TEMPLATE:
            raise InvalidParameter(f"chat_template has {len(given):,} characters. Allowed: {_LONGEST_TEMPLATE:,}.")
        return ChatTemplate(given, "The given chat template")
    if given.endswith(TEMPLATE_SUFFIXES):
        return _from_file(Path(given))
    raise InvalidParameter(
        f"chat_template={shown(given)} is no Jinja template: it has no {{{{ }}}}. Allowed: a template's text, the path "
        f"of a file that ends with {', '.join(TEMPLATE_SUFFIXES)}, or of any as a pathlib.Path."
    )


def render_chat(
    renderer: TemplateRenderer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
    write_calls: WriteCalls = plain_calls,
    variables: Mapping[str, Any] | None = None,
    content_format: str = AUTO,
) -> str:
    """Render a conversation.

    messages: plain data, whose contents are texts or lists of parts; content_format: see `in_content_format`.
    special_tokens: variables such as `bos_token`. tools: descriptions, or functions to describe.
    write_calls: form of calls that a template without `tools` is told in messages (`told_tools`).
    variables: further template variables, which override special tokens.

    Raises ChatTemplateError for an error of the template, InvalidRequest for tools that it cannot show.
    """
    further = {**special_tokens, **plain_data("chat_template_kwargs", dict(variables or {}))}
    described = None if tools is None else [_described(tool, f"tools[{index}]") for index, tool in enumerate(tools)]

    def render(plain: Sequence[Mapping[str, Any]]) -> str:
        try:
            return render_once(plain)
        except ChatTemplateError as error:
            # Some templates write arguments as they come, and so need JSON text.
            texts = [_with_arguments_as_text(message) for message in plain]
            if texts == plain:
                raise
            try:
                return render_once(texts)
            except ChatTemplateError:
                raise error from None

    def render_once(plain: Sequence[Mapping[str, Any]]) -> str:
        chat = [_with_reasoning(in_content_format(message, template.source, content_format)) for message in plain]
        if _TAKES_ONE_TEXT in template.source:
            chat = [_with_one_text(message) for message in chat]
        last = _mark_end(chat, template) if continue_final_message else None
        ours = {"messages": chat, "tools": described, "add_generation_prompt": add_generation_prompt}
        text = renderer.render(template.source, {"documents": None, **further, **ours}, name=template.name)
        return text if last is None else _cut_at_mark(text, last, template)

    if not (described or has_tool_messages(messages)) or knows_tools(renderer, template):
        return render(messages)
    # What is told stands in texts.
    messages = [in_content_format(message, template.source, STRING) for message in messages]
    shown = messages if _KNOWS_CALLS in template.source else plain_history(messages, write_calls)
    if not described:
        return render(shown)
    if not renderer.has_warned_of_tools:
        renderer.has_warned_of_tools = True
        logger.warning(
            "%s has no variable `tools`: tools, and the form of calls, are told in a message, which the model "
            "was not trained for. A chat_template that shows tools may give better calls. Further conversations with "
            "tools get no warning.",
            template.name,
        )
    return render_with_told_tools(render, shown, described, write_calls, _lower(template.name))


def knows_tools(renderer: TemplateRenderer, template: ChatTemplate) -> bool:
    """Whether a template has a variable `tools`. Raises ChatTemplateError for one that cannot be compiled."""
    return "tools" in renderer.names_of(template.source, name=template.name)


def _own_template(templates: ModelTemplates, folder: Path, tools: Sequence[Any] | None) -> str:
    source = templates.choose(folder, tools)
    if not isinstance(source, str):
        raise InvalidRequest(
            f"The chat template of {shown_model(folder)} is a {type(source).__name__}. Give chat_template."
        )
    return source


def _from_file(path: Path) -> ChatTemplate:
    # A directory, or what is written to by another process, has no size.
    if not path.is_file():
        raise InvalidParameter(
            f"chat_template={str(path)!r} is not the path of a file that exists. Allowed: the path of a file with a "
            "Jinja template, or its text."
        )
    try:
        size = path.stat().st_size
        if size > _LONGEST_TEMPLATE:
            raise InvalidParameter(f"chat_template={str(path)!r} has {size:,} bytes. Allowed: {_LONGEST_TEMPLATE:,}.")
        return ChatTemplate(path.read_text(encoding="utf-8"), f"The chat template {path.name}")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"chat_template={str(path)!r} cannot be read: {error}") from error


def _as_builtin(value: Any) -> Any:
    """Convert a value that msgspec does not know."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return dict(value)
    for method in ("model_dump", "tolist"):
        convert: Callable[[], Any] | None = getattr(value, method, None)
        if callable(convert):
            return convert()
    raise TypeError(f"it has a {type(value).__name__}")


def _described(tool: Any, name: str) -> dict[str, Any]:
    """Return a tool's JSON schema; Transformers makes one of a function."""
    if isinstance(tool, (FunctionType, MethodType)):
        from transformers.utils import get_json_schema

        try:
            return dict(get_json_schema(tool))
        except Exception as error:  # of its own kinds, which are not public
            raise InvalidRequest(f"{name}, {shown(tool)}, cannot be described: {error}") from error
    plain = plain_data(name, tool)
    if not isinstance(plain, dict):
        raise InvalidRequest(f"{name} is {shown(tool)}. Allowed: a description as a dictionary, or a function.")
    return plain


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without None fields, and with its reasoning under the names that templates read."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content beside calls is the end of its reasoning, if it has both."""
    content, reasoning = message.get("content"), message.get("thinking")
    if not (message.get("tool_calls") and isinstance(content, str) and content and isinstance(reasoning, str)):
        return message
    return {**message, "content": "", "thinking": f"{reasoning}\n\n{content}" if reasoning else content}


def _with_arguments_as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls have arguments as JSON text, if it calls functions in OpenAI's form."""
    calls = message.get("tool_calls") or []
    if not all(isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls):
        return message
    texts = [json.dumps(call["function"].get("arguments", {}), ensure_ascii=False) for call in calls]
    with_texts = [
        {**call, "function": {**call["function"], "arguments": text}} for call, text in zip(calls, texts, strict=True)
    ]
    return {**message, "tool_calls": with_texts} if calls else message


def _mark_end(chat: list[dict[str, Any]], template: ChatTemplate) -> str:
    """Mark the end of the last message's text; return that text."""
    last = content = chat[-1].get("content")
    if isinstance(content, list) and content:
        last = content[-1].get("text")
    if not isinstance(last, str) or "content" not in template.source:
        raise ChatTemplateError(
            f"continue_final_message=True goes on with the content of the last message, but "
            f"{'that has none' if 'content' in template.source else _lower(template.name) + ' uses no content'}."
        )
    marked = last + _END_MARK
    chat[-1]["content"] = [*content[:-1], {**content[-1], "text": marked}] if isinstance(content, list) else marked
    return last


def _cut_at_mark(text: str, last: str, template: ChatTemplate) -> str:
    end = text.rfind(_END_MARK.strip())
    if end < 0 or last.strip() not in text:
        raise ChatTemplateError(
            f"continue_final_message=True goes on with the last message, but {_lower(template.name)} does not render "
            f"it as it is: {shown(last)}."
        )
    is_stripped = not text.startswith(_END_MARK, end)
    text = text[:end].rstrip() if is_stripped else text[:end]
    # A template may show the message more than once.
    return text.replace(_END_MARK.strip() if is_stripped else _END_MARK, "")


def _lower(name: str) -> str:
    return name[0].lower() + name[1:]
