"""Chat request as the engine gets it: answer format, sampling parameters and prompt.

The responses and messages APIs translate their requests to chat requests, so that all three share this.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from penstock.contract import SamplingParams
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.requests.answer import AnswerFormat
from penstock.server.requests.conversation import render_request
from penstock.server.requests.formats import choose_format
from penstock.server.requests.generation import Submission
from penstock.server.requests.sampling import chat_max_tokens, client_names, sampling_params, structured_outputs
from penstock.server.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A chat request for the engine, and the format of its answers."""

    form: AnswerFormat
    submission: Submission


async def prepare_chat(model: ServedModel, request: ChatCompletionRequest, id: str) -> ChatTask:
    """Task of a chat request. id: its name at the engine. Raises InvalidRequest."""
    # Schemas may take long, and the first markers of reasoning.
    form, params = await asyncio.to_thread(_form_and_params, model, request)
    prompt = await render_request(model, request)
    return ChatTask(form, Submission(prompt, params, id, request.priority))


def _form_and_params(model: ServedModel, request: ChatCompletionRequest) -> tuple[AnswerFormat, SamplingParams]:
    form = choose_format(
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        structured_outputs=structured_outputs(request),
        options=model.options,
        tokenizer=model.tokenizer,
    )
    return form, _params(request, model.default_params, form)


def chat_client_names(request: ChatCompletionRequest) -> dict[str, str]:
    """Names of parameters in errors, by the engine's names."""
    names = client_names(request) | {"logprobs": "top_logprobs"}
    return names if request.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}


def _params(request: ChatCompletionRequest, defaults: SamplingParams, form: AnswerFormat) -> SamplingParams:
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    changes: dict[str, Any] = {
        "max_tokens": chat_max_tokens(asked, defaults),
        "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
        "structured_outputs": form.structured_outputs,
    }
    if not form.skip_special_tokens:
        changes["skip_special_tokens"] = False
    return sampling_params(request, defaults, **changes)
