"""Routes `/v1/messages` and `/v1/messages/count_tokens`, in the shape of Anthropic's API."""

from __future__ import annotations

import asyncio
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.http.body import BodyRoute
from penstock.server.http.connection import StreamForm
from penstock.server.http.errors import json_response, refusals
from penstock.server.messages.output import MessageWriter, error_event
from penstock.server.messages.request import chat_request
from penstock.server.protocol.messages_request import CountTokensRequest, MessagesRequest
from penstock.server.protocol.responses import COUNT_RESPONSES, MESSAGES_RESPONSES
from penstock.server.requests.chat_task import prepare_chat
from penstock.server.requests.conversation import render_request
from penstock.server.routes.common import answer_chat, served_model

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/messages", responses=MESSAGES_RESPONSES)
async def create_message(request: MessagesRequest, http: Request) -> Response:
    """Answer a conversation."""
    model = await served_model(http).named(request.model)
    chat, names = chat_request(request, has_reasoning=model.options.reasoning_parser is not None)
    id = f"msg_{uuid.uuid4().hex}"
    with refusals(type(request).model_fields, names):
        task = await prepare_chat(model, chat, id)
        writer = MessageWriter(task, id, model.name)
        return await answer_chat(http, model, task, writer, StreamForm(error_event))


@router.post("/v1/messages/count_tokens", responses=COUNT_RESPONSES)
async def count_tokens(request: CountTokensRequest, http: Request) -> Response:
    """Number of tokens of a conversation's prompt."""
    model = await served_model(http).named(request.model)
    chat, names = chat_request(request, has_reasoning=model.options.reasoning_parser is not None)
    with refusals(type(request).model_fields, names):
        prompt = await asyncio.to_thread(render_request, model, chat)
        token_ids = await model.engine.tokenize(prompt, add_special_tokens=False)
    return json_response({"input_tokens": len(token_ids)})
