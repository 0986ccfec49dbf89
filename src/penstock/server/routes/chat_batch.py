"""Route `/v1/chat/completions/batch`: several conversations in one request."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.errors import InvalidParameter, InvalidRequest
from penstock.server.http.body import BodyRoute
from penstock.server.http.errors import json_response, refusals
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.responses import ChatCompletionResponse, errors
from penstock.server.protocol.tokens import BatchChatRequest
from penstock.server.requests.chat_task import ChatTask, chat_client_names, prepare_chat
from penstock.server.routes.chat import ChatChoices
from penstock.server.routes.common import response_id, served_model, whole_outputs
from penstock.server.served_model import ServedModel

router = APIRouter(route_class=BodyRoute)
_ERRORS = errors(400, 401, 404, 408, 413, 429, 500, 503)


@router.post("/v1/chat/completions/batch", responses={200: {"model": ChatCompletionResponse}, **_ERRORS})
async def create_chat_completions(request: BatchChatRequest, http: Request) -> Response:
    """Answer several conversations: choice i is the answer to conversation i."""
    model = await served_model(http).named(request.model)
    id = response_id("chatcmpl", request)
    chats = request.chats
    with refusals(type(request).model_fields, chat_client_names(request)):
        prepared = (_prepare(model, chat, f"{id}-{index}", index) for index, chat in enumerate(chats))
        tasks = await asyncio.gather(*prepared)
        outputs = await whole_outputs(http, [task.submission for task in tasks], request.timeout, model.parts)
    answers = [
        await ChatChoices(model, chat, task.form, task.submission.params, id).whole([output])
        for chat, task, output in zip(chats, tasks, outputs, strict=True)
    ]
    return json_response(_together(answers), headers=tasks[0].headers)


async def _prepare(model: ServedModel, chat: ChatCompletionRequest, id: str, index: int) -> ChatTask:
    """Task of a conversation, whose number is in its errors."""
    where = f"messages[{index}]"
    try:
        task = await prepare_chat(model, chat, id)
    except InvalidParameter:
        # It is a parameter of all conversations.
        raise
    except InvalidRequest as error:
        raise type(error)(f"{where}: {error}") from error
    return replace(task, submission=replace(task.submission, where=where))


def _together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One body of several, with their choices and the sum of their usage."""
    choices = [{**answer["choices"][0], "index": index} for index, answer in enumerate(answers)]
    return {**answers[0], "choices": choices, "usage": _sum([answer["usage"] for answer in answers])}


def _sum(usages: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: _sum([usage[name] for usage in usages]) if isinstance(value, dict) else sum(one[name] for one in usages)
        for name, value in usages[0].items()
    }
