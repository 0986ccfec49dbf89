"""Chat request as the engine gets it: answer format, sampling parameters and prompt.

The responses and messages APIs translate their requests to chat requests, so that all three share this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.contract import SamplingParams
from penstock.engine.inputs.prompts import with_parts
from penstock.server.chat_model import ChatModel
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.requests.answer import AnswerFormat
from penstock.server.requests.conversation import render_request
from penstock.server.requests.formats import choose_format
from penstock.server.requests.generation import Submission
from penstock.server.requests.hidden_states import hidden_states_parts
from penstock.server.requests.kv_transfer import kv_transfer_parts
from penstock.server.requests.sampling import chat_max_tokens, client_names, sampling_params, structured_outputs

# Header of responses to requests whose tools no template shows.
_TOLD_TOOLS = {"x-penstock-tools": "in-message"}


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A chat request, what it is for the engine, and the format of its answers. headers: of the response."""

    request: ChatCompletionRequest
    form: AnswerFormat
    submission: Submission
    headers: Mapping[str, str] = field(default_factory=dict)


async def prepare_chat(model: ChatModel, request: ChatCompletionRequest, id: str) -> ChatTask:
    """As `chat_task`, in a thread."""
    return await asyncio.to_thread(chat_task, model, request, id)


def chat_task(model: ChatModel, request: ChatCompletionRequest, id: str) -> ChatTask:
    """Task of a chat request. id: its name at the engine. Raises InvalidRequest.

    It takes some milliseconds; schemas may take long, and the first markers of reasoning.
    """
    has_tools = bool(request.tools) and request.tool_choice != "none"
    tools = model.template_tools(request.chat_template) if has_tools else None
    form = choose_format(
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        structured_outputs=structured_outputs(request, model.default_params.structured_outputs),
        options=model.options,
        tokenizer=model.tokenizer,
        shown=tools,
    )
    params = chat_params(request, model.default_params, form)
    prompt = with_parts(render_request(model, request), [*hidden_states_parts(request), *kv_transfer_parts(request)])
    headers = _TOLD_TOOLS if tools is not None and tools.are_told else {}
    return ChatTask(request, form, Submission(prompt, params, id, request.priority), headers)


def chat_client_names(request: ChatCompletionRequest) -> dict[str, str]:
    """Names of parameters in errors, by the engine's names."""
    names = client_names(request) | {"logprobs": "top_logprobs"}
    return names if request.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}


def chat_params(request: ChatCompletionRequest, defaults: SamplingParams, form: AnswerFormat) -> SamplingParams:
    """Sampling parameters of a request with answers in this format. Raises InvalidParameter."""
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    changes: dict[str, Any] = {
        "max_tokens": chat_max_tokens(asked, defaults),
        "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
        "structured_outputs": form.structured_outputs,
    }
    if not form.skip_special_tokens:
        changes["skip_special_tokens"] = False
    return sampling_params(request, defaults, **changes)
