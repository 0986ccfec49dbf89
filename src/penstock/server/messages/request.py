"""Requests of `/v1/messages` as chat requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.server.http.fields import not_valid, object_of, parts_of, string_of, texts_of
from penstock.server.protocol.base import GenerationFields
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.messages_request import InputMessage, InputTool, MessagesFields, MessagesRequest
from penstock.server.requests.chat_messages import ChatMessages, content_of, image_part
from penstock.server.requests.chat_task import chat_client_names

# Fields of chat requests by their names.
_SAME = (*(name for name in GenerationFields.model_fields if name != "thinking_token_budget"), "chat_template")
_TEXTS = {"text": "text"}
# Claude Code begins its system prompt with a line that differs in each request, so that no prefix would be cached.
_BILLING = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERROR = "Error: "


def chat_request(request: MessagesFields, *, has_reasoning: bool) -> tuple[ChatCompletionRequest, dict[str, str]]:
    """The request as a chat request, and the client's names of parameters in errors, by the engine's names.

    has_reasoning: whether the server knows the model's reasoning, without which it has no budget. Raises ApiError.
    """
    conversation = _conversation(request)
    fields = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    fields["messages"] = conversation.messages
    if request.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(request, MessagesRequest):
        fields |= {"max_tokens": request.max_tokens, "stop": request.stop_sequences}
    if request.format is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": request.format.schema_}}
    chat = ChatCompletionRequest(**fields, **_tool_fields(request), **_thinking_fields(request, has_reasoning))
    return chat, _client_names(request, chat, conversation)


def _conversation(request: MessagesFields) -> ChatMessages:
    chat = ChatMessages()
    if request.system is not None:
        texts = [text for text in texts_of(request.system, "system", _TEXTS) if not text.startswith(_BILLING)]
        if texts:
            chat.add({"role": "system", "content": content_of(texts)}, "system")
    for index, message in enumerate(request.messages):
        path = f"messages[{index}]"
        if message.role == "assistant":
            _add_answer(chat, message, path)
        else:
            _add_input(chat, message, path)
    return chat


def _blocks(message: InputMessage, path: str) -> list[tuple[Mapping[str, Any], str]]:
    """Blocks of a message, each with its path."""
    if isinstance(message.content, str):
        return [({"type": "text", "text": message.content}, f"{path}.content")]
    paths = [f"{path}.content[{index}]" for index in range(len(message.content))]
    return [(object_of(block, at), at) for block, at in zip(message.content, paths, strict=True)]


def _add_input(chat: ChatMessages, message: InputMessage, path: str) -> None:
    """Add the results of tools, and the texts and images, of a user's message."""
    parts: list[str | dict[str, Any]] = []
    has_results = False
    for block, at in _blocks(message, path):
        match block.get("type"):
            case "text":
                parts.append(string_of(block, "text", at))
            case "image":
                parts.append(_image(block, at))
            case "tool_result" if message.role == "user":
                if parts:
                    chat.add({"role": "user", "content": content_of(parts)}, path)
                parts, has_results = [], True
                chat.add_result(string_of(block, "tool_use_id", at), _result(block, at), at)
            case kind:
                raise not_valid(f"{at}.type", kind, "text, image, tool_result")
    if parts or not has_results:
        chat.add({"role": message.role, "content": content_of(parts)}, path)


def _image(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Part of a chat message with the image of a block."""
    at = f"{path}.source"
    source = object_of(block.get("source"), at)
    match source.get("type"):
        case "base64":
            url = f"data:{string_of(source, 'media_type', at)};base64,{string_of(source, 'data', at)}"
        case "url":
            url = string_of(source, "url", at)
        case kind:
            raise not_valid(f"{at}.type", kind, "base64, url")
    return image_part(url)


def _result(block: Mapping[str, Any], path: str) -> list[str | dict[str, Any]]:
    """Texts and images of a tool's result. Chat messages cannot say that it is an error, so that its text does."""
    parts = parts_of(block.get("content") or "", f"{path}.content", _TEXTS, {"image": _image})
    if not block.get("is_error"):
        return parts
    first = parts[0] if parts and isinstance(parts[0], str) else ""
    return [_ERROR + first, *parts[bool(first) :]]


def _add_answer(chat: ChatMessages, message: InputMessage, path: str) -> None:
    texts: list[str] = []
    thoughts: list[str] = []
    calls = []
    for block, at in _blocks(message, path):
        match block.get("type"):
            case "text":
                texts.append(string_of(block, "text", at))
            case "thinking":
                thoughts.append(string_of(block, "thinking", at))
            case "redacted_thinking":
                # Encrypted reasoning of another server, which no model here can read.
                continue
            case "tool_use":
                calls.append(_call(block, at))
            case kind:
                raise not_valid(f"{at}.type", kind, "text, thinking, redacted_thinking, tool_use")
    answer: dict[str, Any] = {"role": "assistant"}
    if texts or not calls:
        answer["content"] = "".join(texts)
    if thoughts:
        answer["reasoning"] = "\n".join(thoughts)
    chat.add(answer, path)
    for call in calls:
        chat.add_call(*call, path)


def _call(block: Mapping[str, Any], path: str) -> tuple[str, str, str]:
    given = block.get("input")
    # As arguments of earlier calls in the other APIs: an empty object where they are none.
    arguments = given if isinstance(given, Mapping) else {}
    return string_of(block, "id", path), string_of(block, "name", path), json.dumps(arguments, ensure_ascii=False)


def _tool_fields(request: MessagesFields) -> dict[str, Any]:
    choice = request.tool_choice
    fields: dict[str, Any] = {"tools": [_tool(tool) for tool in request.tools or ()]}
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _tool(tool: InputTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _thinking_fields(request: MessagesFields, has_reasoning: bool) -> dict[str, Any]:
    thinking, budget = request.thinking, request.thinking_token_budget
    variables: dict[str, Any] = {}
    if thinking is not None and thinking.type != "adaptive":
        variables["enable_thinking"] = thinking.type == "enabled"
        if budget is None and has_reasoning and thinking.type == "enabled":
            budget = thinking.budget_tokens
    return {
        "chat_template_kwargs": variables | (request.chat_template_kwargs or {}) or None,
        "thinking_token_budget": budget,
        "reasoning_effort": None if request.output_config is None else request.output_config.effort,
    }


def _client_names(request: MessagesFields, chat: ChatCompletionRequest, conversation: ChatMessages) -> dict[str, str]:
    names = chat_client_names(chat) | {"stop": "stop_sequences"}
    if request.format is not None:
        path = "output_format" if request.output_format is not None else "output_config.format"
        names |= {"structured_outputs.json": f"{path}.schema", "structured_outputs": path}
    for index in range(len(request.tools or ())):
        names[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
        names[f"tools[{index}].function"] = f"tools[{index}]"
    return names | conversation.paths
