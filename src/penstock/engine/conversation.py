"""From a conversation to a prompt, by the model's chat template or another one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from penstock.config import vllm
from penstock.contract.param_checks import shown
from penstock.engine.prompts import PromptDict, RenderedText, as_list
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import InvalidParameter, InvalidRequest

Message: TypeAlias = Mapping[str, Any]


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PromptDict:
    """The conversation as a prompt, which is tokenised once it is given to an engine.

    messages: each with a `role` and, as a rule, `content`: text, or a list of parts of type "text".
    chat_template: a Jinja template, instead of the model's own. add_generation_prompt: end with the beginning of an
    answer. continue_final_message: leave the last message open, so that the model goes on with it.
    tools, chat_template_kwargs: what the template may use besides.

    Raises InvalidRequest, or InvalidParameter for a bad option.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidParameter(
            "continue_final_message=True goes on with the last message, but add_generation_prompt=True begins another. "
            "Set one of them to False."
        )
    variables = dict(chat_template_kwargs or {})
    taken = _taken_names() if variables else []
    for name in variables:
        if name in taken:
            raise InvalidParameter(
                f"chat_template_kwargs has {shown(name)}, which is no variable of a template. "
                f"Not allowed: {', '.join(taken)}."
            )
    if tools is not None:
        variables["tools"] = list(tools)
    if continue_final_message:
        variables["continue_final_message"] = True
    text = tokenizer.apply_chat_template(
        _plain_messages(messages),
        add_generation_prompt=add_generation_prompt,
        chat_template=chat_template,
        **variables,
    )
    return {"prompt": RenderedText(text)}


def _taken_names() -> list[str]:
    """What the rendering itself is told; a template's own variables cannot have these names."""
    from transformers import PreTrainedTokenizerBase

    told = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    return sorted((told - {"self", "kwargs"}) | {"messages"})


def list_of_conversations(messages: Any) -> list[Any]:
    """One conversation, or several, as a list of conversations."""
    listed = as_list(messages)
    if listed is None:
        raise InvalidRequest(
            f"messages is a {type(messages).__name__}. Allowed: a list of messages, or a list of such lists."
        )
    conversations = [as_list(item) for item in listed]
    has_several = bool(listed) and all(conversation is not None for conversation in conversations)
    return conversations if has_several else [listed]


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest(f"The conversation {shown(messages)} has no messages. Give at least one.")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: Any, name: str) -> dict[str, Any]:
    """The message with its content as one text, which every template understands."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(
            f'{name} is {shown(message)}. Allowed: a dictionary such as {{"role": "user", "content": "Hi"}}.'
        )
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "\n".join(_text_of_part(part, f"{name}.content[{index}]") for index, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(
            f"{name}.content={shown(content)} is a {type(content).__name__}. Allowed: text, or text parts."
        )
    return {**message, "content": "" if content is None else content}


def _text_of_part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        vllm.check_kind_of_part(name, kind)
        raise InvalidRequest(
            f'{name} is {shown(part)}. Allowed: {{"type": "text", "text": "..."}}; models here read text.'
        )
    return str(part["text"])
