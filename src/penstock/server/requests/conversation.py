"""Conversations of requests, rendered as prompts."""

from __future__ import annotations

from typing import Any

from penstock.engine.inputs.prompts import PromptDict
from penstock.server.protocol.chat import ChatCompletionRequest, ChatMessage, TemplateFields
from penstock.server.requests.formats import template_messages
from penstock.server.served_model import ServedModel


async def render_request(model: ServedModel, request: ChatCompletionRequest) -> PromptDict:
    """Prompt of a chat request. Raises InvalidRequest."""
    tools = None if request.tool_choice == "none" else request.tools
    variables = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
    prompt = await render(model, request.messages, request, tools, variables)
    if request.add_special_tokens:
        prompt["prompt"] = str(prompt["prompt"])
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    return prompt


async def render(
    model: ServedModel,
    messages: list[ChatMessage],
    fields: TemplateFields,
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any],
) -> PromptDict:
    """Prompt of a conversation. variables: of the template, which `chat_template_kwargs` may override."""
    if fields.documents is not None:
        variables = variables | {"documents": fields.documents}
    return await model.render(
        lambda: template_messages([message.model_dump(exclude_none=True) for message in messages]),
        chat_template=fields.chat_template,
        add_generation_prompt=fields.begins_message,
        continue_final_message=fields.continue_final_message,
        tools=tools or None,
        variables=variables | (fields.chat_template_kwargs or {}),
    )
