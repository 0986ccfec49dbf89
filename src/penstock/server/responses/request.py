"""Requests of `/v1/responses` as chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.server.http.fields import not_valid, object_of
from penstock.server.protocol.base import GenerationFields
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.responses_request import LOGPROBS, FlatJsonSchemaFormat, ResponsesRequest
from penstock.server.requests.chat_messages import ChatMessages
from penstock.server.requests.chat_task import chat_client_names
from penstock.server.responses.items import add_items

_SAME = (
    *GenerationFields.model_fields,
    "stop",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template",
)


def chat_request(
    request: ResponsesRequest, history: Sequence[dict[str, Any]], items: Sequence[dict[str, Any]]
) -> tuple[ChatCompletionRequest, dict[str, str]]:
    """The request as a chat request, and the client's names of parameters in errors, by the engine's names.

    history: items of the conversation before. items: of the request. Raises ApiError.
    """
    conversation = ChatMessages()
    if request.instructions is not None:
        conversation.add_system("system", [request.instructions], "instructions")
    add_items(conversation, history, lambda _: "previous_response_id")
    add_items(conversation, items, lambda index: "input" if isinstance(request.input, str) else f"input[{index}]")
    fields = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    fields |= {
        "messages": conversation.messages,
        "tools": _tools(request.tools or ()),
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": LOGPROBS in request.include,
        "response_format": _response_format(request),
        **_reasoning_fields(request),
    }
    if LOGPROBS in request.include:
        fields["top_logprobs"] = request.top_logprobs
    chat = ChatCompletionRequest(**fields)
    return chat, _client_names(request, chat, conversation)


def _tools(given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools in the form of chat requests, which templates read."""
    tools = []
    for index, item in enumerate(given):
        path = f"tools[{index}]"
        tool = dict(object_of(item, path))
        if tool.pop("type", None) != "function":
            raise not_valid(f"{path}.type", item.get("type"), "function")
        tools.append({"type": "function", "function": {k: v for k, v in tool.items() if v is not None}})
    return tools


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    form = None if request.text is None else request.text.format
    if isinstance(form, FlatJsonSchemaFormat):
        return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}
    return None if form is None else {"type": form.type}


def _reasoning_fields(request: ResponsesRequest) -> dict[str, Any]:
    effort = None if request.reasoning is None else request.reasoning.effort
    variables = {"enable_thinking": False} if effort == "none" else {}
    return {
        "reasoning_effort": effort,
        "chat_template_kwargs": variables | (request.chat_template_kwargs or {}) or None,
    }


def _client_names(request: ResponsesRequest, chat: ChatCompletionRequest, conversation: ChatMessages) -> dict[str, str]:
    names = chat_client_names(chat) | {"max_tokens": "max_output_tokens"}
    if chat.response_format is not None:
        names |= {"structured_outputs.json": "text.format.schema", "structured_outputs": "text.format"}
    names |= {f"tools[{index}].function": f"tools[{index}]" for index in range(len(request.tools or ()))}
    names |= {"reasoning_effort": "reasoning.effort"}
    return names | conversation.paths | {"messages": "input"}
