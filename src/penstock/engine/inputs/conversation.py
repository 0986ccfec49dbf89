"""Render conversations as prompts with the model's chat template or another one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from penstock.config import vllm
from penstock.config.multimodal import MODALITIES
from penstock.contract.param_checks import shown
from penstock.engine.inputs.prompts import DATA, UUIDS, PromptDict, RenderedText, as_list
from penstock.errors import InvalidParameter, InvalidRequest
from penstock.media.content_parts import MessageMedia
from penstock.templates.chat_template import plain_data
from penstock.templates.content_format import AUTO, CONTENT_FORMATS
from penstock.templates.told_tools import WriteCalls, plain_calls
from penstock.text.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
# Types of a content's parts that have text, under the same name.
_KINDS_OF_TEXT = ("text", "refusal")
# Template variables that have arguments of their own, and so cannot be `chat_template_kwargs`.
_OWN_ARGUMENTS = ("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    chat_template: str | Path | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    write_calls: WriteCalls = plain_calls,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    chat_template_content_format: str = AUTO,
) -> PromptDict:
    """Render the conversation as a prompt, which the engine tokenises.

    messages: each with a `role` and, as a rule, `content`: text, or a list of parts of type "text" or "refusal", or
        with images, audio or video (`content_parts`). Arguments of tool calls may be objects, or JSON text.
    chat_template: a Jinja template, instead of the model's own; or the path of a file with one, as a Path, or as text
        that ends with `.jinja`, `.jinja2` or `.j2`.
    add_generation_prompt: end with the beginning of an answer. continue_final_message: leave the last message open for
        the model to continue.
    tools: descriptions of functions. A template without a variable for them gets them in a message, with the form of
        calls, as `write_calls` writes them.
    chat_template_kwargs: other variables that the template may use, such as `documents` or `enable_thinking`.
    chat_template_content_format: "string" gives the template one text per message, "openai" a list of parts, "auto"
        what it reads.

    Raises InvalidRequest: UnsupportedParameter for media that the model does not take, InvalidParameter for a bad
    option, ChatTemplateError when the template refuses the messages or exceeds its limits of time, memory or output.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidParameter(
            "continue_final_message=True goes on with the last message, but add_generation_prompt=True begins another. "
            "Set one of them to False."
        )
    if tools is not None and as_list(tools) is None:
        raise InvalidParameter(f"tools={shown(tools)} is not valid. Allowed: a list of descriptions.")
    if chat_template_content_format not in CONTENT_FORMATS:
        raise InvalidParameter(
            f"chat_template_content_format={shown(chat_template_content_format)} is not valid. "
            f"Allowed: {', '.join(CONTENT_FORMATS)}."
        )
    media = MessageMedia(tokenizer.media_markers)
    plain = _plain_messages(messages, media)
    text = tokenizer.apply_chat_template(
        media.as_text(plain),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=chat_template,
        tools=media.as_text(as_list(tools)),
        write_calls=write_calls,
        variables=media.as_text(_variables(chat_template_kwargs)),
        content_format=chat_template_content_format,
    )
    prompt: Any = {"prompt": RenderedText(text)}
    if media.data:
        prompt[DATA] = media.data
    if media.has_uuids:
        prompt[UUIDS] = media.uuids
    return cast("PromptDict", prompt)


def _variables(given: Any) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise InvalidParameter(f"chat_template_kwargs={shown(given)} is not valid. Allowed: a dictionary.")
    for name in given or {}:
        if not isinstance(name, str):
            raise InvalidParameter(f"chat_template_kwargs has {shown(name)}, which is not a name of a variable.")
        if name in _OWN_ARGUMENTS:
            raise InvalidParameter(f"chat_template_kwargs has {name!r}, which is an argument of its own. Give {name}=.")
    return dict(given or {})


def list_of_conversations(messages: Any) -> list[Any]:
    """Return one conversation, or several, as a list of conversations."""
    listed = as_list(messages)
    if listed is None:
        raise InvalidRequest(
            f"messages is a {type(messages).__name__}. Allowed: a list of messages, or a list of such lists."
        )
    conversations = [as_list(item) for item in listed]
    has_several = bool(listed) and all(conversation is not None for conversation in conversations)
    return conversations if has_several else [listed]


def _plain_messages(messages: Any, media: MessageMedia) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest(f"The conversation {shown(messages)} has no messages. Give at least one.")
    return [_plain_message(message, name, media) for name, message in _named("messages", messages)]


def _plain_message(message: Any, name: str, media: MessageMedia) -> dict[str, Any]:
    """Return the message with a content of text or parts, and tool-call arguments as objects. media: gets its media."""
    # Media are no plain data, which only objects of a client's library become before media are taken out of them.
    message = message if isinstance(message, Mapping) else plain_data(name, message)
    message = plain_data(name, media.without(message, name) if isinstance(message, Mapping) else message)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest(
            f'{name} is {shown(message)}. Allowed: a dictionary such as {{"role": "user", "content": "Hi"}}.'
        )
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = [_plain_part(part, f"{name}.content[{index}]") for index, part in enumerate(content)]
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(
            f"{name}.content={shown(content)} is a {type(content).__name__}. Allowed: text, or text parts."
        )
    # A refusal stands instead of the content of an answer.
    refusal = message.get("refusal")
    plain = {**message, "content": content or (refusal if isinstance(refusal, str) else "")}
    if isinstance(calls := message.get("tool_calls"), (list, tuple)):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: Any) -> Any:
    """Return a tool call with its arguments as an object; OpenAI clients send JSON text.

    Other arguments, such as JSON that a limit has cut off, are an empty object: the conversation goes on without them.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _named(name: str, items: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Pairs of path and item."""
    return ((f"{name}[{index}]", item) for index, item in enumerate(items))


def _plain_part(part: Any, name: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Mapping) and part.get("type") in MODALITIES:
        return dict(part)
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _KINDS_OF_TEXT or not isinstance(part.get(kind), str):
        vllm.check_kind_of_part(name, kind)
        raise InvalidRequest(
            f'{name} is {shown(part)}. Allowed: {{"type": "text", "text": "..."}}, or an image, audio or a video.'
        )
    return {"type": "text", "text": str(part[kind])}
