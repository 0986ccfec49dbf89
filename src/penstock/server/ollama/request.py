"""Requests of Ollama's API as chat requests."""

from __future__ import annotations

import json
from typing import Any

from penstock.contract.param_checks import shown
from penstock.server.http.errors import ApiError
from penstock.server.ollama.protocol import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGeneration,
    OllamaMessage,
)
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.other_fields import HARMLESS_FIELDS
from penstock.server.requests.chat_messages import ChatMessages, content_of, image_part
from penstock.server.requests.chat_task import chat_client_names

# Parameters by the names of Ollama's options.
_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_completion_tokens",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
# Options that are not built, with the values by which they are off.
_OFF: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "tfs_z": (1,),
    "typical_p": (1,),
    "repeat_last_n": (-1,),
    "penalize_newline": (True,),
}
# Options that change nothing: memory and threads of the model, and parameters of a sampler that is off.
_HARMLESS = HARMLESS_FIELDS | {"mirostat_tau", "mirostat_eta", "logits_all"}
# num_predict of an answer without a limit: until the end of the text, or of the context.
_UNLIMITED = (-1, -2)


def generation_fields(request: OllamaGeneration) -> dict[str, Any]:
    """Fields of a chat request, without its messages. Raises ApiError for options that would change the answer."""
    fields: dict[str, Any] = {"model": request.model, "stream": request.stream}
    for name, value in (request.options or {}).items():
        path = f"options.{name}"
        if value is None or name in _HARMLESS:
            continue
        if name in _OFF:
            if value not in _OFF[name]:
                allowed = " or ".join(map(str, _OFF[name]))
                raise ApiError(400, f"{path}={shown(value)} is not available. Allowed: {allowed}.", param=path)
        elif name not in _OPTIONS:
            raise ApiError(400, f"There is no field {path}. Allowed: {', '.join(_OPTIONS)}.", param=path)
        elif not (name == "num_predict" and value in _UNLIMITED):
            fields[_OPTIONS[name]] = _checked(path, name, value)
    if isinstance(request.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": request.format}}
    elif request.format == "json":
        fields["response_format"] = {"type": "json_object"}
    if request.think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": request.think is not False}
        fields["reasoning_effort"] = request.think if isinstance(request.think, str) else None
    if request.logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return fields


def chat_request(
    request: OllamaChatRequest | OllamaGenerateRequest,
) -> tuple[ChatCompletionRequest, dict[str, str]]:
    """The request as a chat request, and the client's names of parameters in errors, by the engine's names.

    Raises ApiError.
    """
    if isinstance(request, OllamaGenerateRequest):
        conversation = ChatMessages()
        if request.system:
            conversation.add_system("system", [request.system], "system")
        content = _content(request.images, request.prompt)
        conversation.add({"role": "user", "content": content}, "prompt")
        tools = None
    else:
        conversation, tools = _conversation(request.messages), request.tools
    fields = generation_fields(request) | {"messages": conversation.messages, "tools": tools}
    chat = ChatCompletionRequest(**fields)
    return chat, client_names(chat) | conversation.paths


def client_names(chat: ChatCompletionRequest) -> dict[str, str]:
    """The client's names of parameters in errors, by the engine's names."""
    names = chat_client_names(chat) | {"structured_outputs.json": "format", "structured_outputs": "format"}
    options = {own: f"options.{name}" for name, own in _OPTIONS.items()}
    return names | options | {"max_tokens": "options.num_predict", "logprobs": "top_logprobs"}


def _checked(path: str, name: str, value: Any) -> Any:
    """Value of an option, if it has the type of the parameter; numbers of clients may be floats for integers."""
    if name == "stop":
        is_valid = isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))
        allowed = "text, or a list of texts"
    else:
        is_valid, allowed = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    if not is_valid:
        raise ApiError(400, f"{path}={shown(value)} is not valid. Allowed: {allowed}.", param=path)
    return int(value) if name in ("top_k", "seed", "num_predict") and value == int(value) else value


def _conversation(messages: list[OllamaMessage]) -> ChatMessages:
    chat = ChatMessages()
    # Calls without a result: name and id.
    waiting: list[tuple[str, str]] = []
    num_calls = 0
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.role == "tool":
            chat.add_result(_answered(waiting, message, path), [message.content or ""], path)
            continue
        plain: dict[str, Any] = {"role": message.role, "content": _content(message.images, message.content)}
        if message.thinking:
            plain["reasoning"] = message.thinking
        calls = []
        for call in message.tool_calls or ():
            id, num_calls = call.id or f"call_{num_calls}", num_calls + 1
            waiting.append((call.function.name, id))
            function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}
            calls.append({"id": id, "type": "function", "function": function})
        if calls:
            plain["tool_calls"] = calls
        chat.add(plain, path)
    return chat


def _content(images: list[str] | None, text: str | None) -> str | list[dict[str, Any]] | None:
    """Content of a message with images before its text. images: as base64."""
    if not images:
        return text
    return content_of([*(image_part(f"data:;base64,{image}") for image in images), text or ""])


def _answered(waiting: list[tuple[str, str]], message: OllamaMessage, path: str) -> str:
    """Id of the call whose result a message is: that of its name, or the first one without a result."""
    if message.tool_call_id is not None:
        return message.tool_call_id
    named = [one for one in waiting if one[0] == message.tool_name] or waiting
    if not named:
        raise ApiError(400, f"{path} is the result of a tool, and no message before it calls one.", param=path)
    waiting.remove(named[0])
    return named[0][1]
