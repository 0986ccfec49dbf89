"""Conversations of requests, rendered as prompts."""

from __future__ import annotations

from typing import Any

from penstock.engine.inputs.prompts import PromptDict
from penstock.server.chat_model import ChatModel
from penstock.server.protocol.chat import ChatCompletionRequest, ChatMessage, TemplateFields
from penstock.server.requests.formats import template_messages


def render_request(model: ChatModel, request: ChatCompletionRequest) -> PromptDict:
    """Prompt of a chat request. It takes some milliseconds. Raises InvalidRequest."""
    tools = None if request.tool_choice == "none" else request.tools
    variables = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
    prompt = render(model, request.messages, request, tools, variables)
    if request.add_special_tokens:
        prompt["prompt"] = str(prompt["prompt"])
    if request.mm_processor_kwargs:
        prompt["mm_processor_kwargs"] = request.mm_processor_kwargs
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    return prompt


def render(
    model: ChatModel,
    messages: list[ChatMessage],
    fields: TemplateFields,
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any],
) -> PromptDict:
    """Prompt of a conversation. variables: of the template, which `chat_template_kwargs` may override."""
    if fields.documents is not None:
        variables = variables | {"documents": fields.documents}
    return model.render(
        template_messages([message.model_dump(exclude_none=True) for message in messages]),
        chat_template=fields.chat_template,
        add_generation_prompt=fields.begins_message,
        continue_final_message=fields.continue_final_message,
        tools=tools or None,
        variables=variables | (fields.chat_template_kwargs or {}),
    )
