"""Routes of the responses API: `/v1/responses`, and what is stored of them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from penstock.engine.inputs.field_limits import check_num_items
from penstock.server.http.body import BodyRoute
from penstock.server.http.connection import StreamForm, while_connected
from penstock.server.http.errors import ApiError, json_response, refusals
from penstock.server.protocol.responses import RESPONSES_RESPONSES, errors
from penstock.server.protocol.responses_request import ResponsesRequest
from penstock.server.requests.chat_task import ChatTask, prepare_chat
from penstock.server.responses.background import BackgroundResponses, cancelled, lost
from penstock.server.responses.items import input_items
from penstock.server.responses.output import ResponseWriter, response_body
from penstock.server.responses.request import chat_request
from penstock.server.responses.store import ResponseStore, StoredResponse
from penstock.server.routes.common import answer_chat, list_page, logprobs_format, served_model
from penstock.server.served_model import ServedModel

logger = logging.getLogger(__name__)
router = APIRouter(route_class=BodyRoute)
_STORED_ERRORS = errors(400, 401, 404, 500)


@router.post("/v1/responses", responses=RESPONSES_RESPONSES)
async def create_response(request: ResponsesRequest, http: Request) -> Response:
    """Answer an input, which may go on with a stored response."""
    model = await served_model(http).named(request.model)
    store = _store(http)
    history = await _history(store, request.previous_response_id)
    items = input_items(request.input)
    with refusals(type(request).model_fields):
        check_num_items("input", len(history) + len(items), model.engine.request_limits)
    chat, names = chat_request(request, history, items)
    id = f"resp_{uuid.uuid4().hex}"
    with refusals(type(request).model_fields, names):
        task = await prepare_chat(model, chat, id)
        stores = request.store and store.keeps_responses
        params = task.submission.params
        base = response_body(request, params, id=id, model=model.name, stores=stores)

        async def on_end(body: dict[str, Any]) -> None:
            if stores:
                # Hidden states may be larger than all that the store keeps.
                kept = {name: value for name, value in body.items() if name != "hidden_states"}
                await _put(store, StoredResponse(kept, [*history, *items]))
                body["store"] = kept["store"]

        form = logprobs_format(model, chat, params.logprobs)
        if request.background:
            if not stores:
                raise ApiError(
                    400, "background=true needs stored responses (max_stored_responses).", param="background"
                )
            stored = StoredResponse({}, [*history, *items])
            return await _in_background(http, model, task, ResponseWriter(task, base, form, _ignore), stored, request)
        writer = ResponseWriter(task, base, form, on_end)
        return await answer_chat(http, model, task, writer, StreamForm(writer.error_event))


@router.get("/v1/responses/{id}", responses={200: {"description": "The response."}, **_STORED_ERRORS})
async def retrieve_response(id: str, http: Request, stream: bool = False) -> Response:
    """A stored response."""
    if stream:
        raise ApiError(400, "stream=true is not available: stored responses are whole.", param="stream")
    return json_response((await _stored(_store(http), id)).body)


@router.delete("/v1/responses/{id}", responses={200: {"description": "It is deleted."}, **_STORED_ERRORS})
async def delete_response(id: str, http: Request) -> Response:
    """Delete a stored response."""
    if not await asyncio.to_thread(_store(http).delete, id):
        raise _not_found(id)
    return json_response({"id": id, "object": "response", "deleted": True})


@router.post("/v1/responses/{id}/cancel", responses={200: {"description": "It is cancelled."}, **_STORED_ERRORS})
async def cancel_response(id: str, http: Request) -> Response:
    """Cancel a response that runs in the background; one with a client ends when its connection closes."""
    store = _store(http)
    stored = await _stored(store, id)
    if stored.body["status"] == "in_progress":
        ended = await asyncio.to_thread(store.end, StoredResponse(cancelled(stored.body), stored.items))
        if ended is None:
            raise _not_found(id)
        stored = ended
    if stored.body["status"] != "cancelled":
        raise ApiError(400, f"The response {id!r} has ended: it is {stored.body['status']}.")
    return json_response(stored.body)


@router.get("/v1/responses/{id}/input_items", responses={200: {"description": "Items."}, **_STORED_ERRORS})
async def list_input_items(
    id: str,
    http: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """Input items of a stored response, with those of the conversation before."""
    items = (await _stored(_store(http), id)).items
    if order == "desc":
        items = items[::-1]
    return list_page(items, limit, after, of=f"the response {id!r}")


def _store(http: Request) -> ResponseStore:
    store: ResponseStore = http.app.state.response_store
    return store


async def _in_background(
    http: Request,
    model: ServedModel,
    task: ChatTask,
    writer: ResponseWriter,
    stored: StoredResponse,
    request: ResponsesRequest,
) -> Response:
    """Begin a response that runs in the background, and return it as it is."""
    stored.body = writer.begun()
    background: BackgroundResponses = http.app.state.background_responses
    trace = model.tracing.begin(http.scope, model.name)
    begun = background.start(model, task, writer, stored, timeout_s=request.timeout, trace=trace)
    await while_connected(http.receive, begun)
    return json_response(stored.body)


async def _ignore(body: dict[str, Any]) -> None:
    """Do nothing with a body that its caller stores."""


async def _put(store: ResponseStore, stored: StoredResponse) -> None:
    """Store a response. An answer is worth more than its copy: a full disk is logged, and the response says so."""
    try:
        await asyncio.to_thread(store.put, stored)
    except OSError as error:
        logger.error("The response %s is not stored: %s", stored.body["id"], error)
        stored.body["store"] = False


async def _history(store: ResponseStore, id: str | None) -> list[dict[str, Any]]:
    if id is None:
        return []
    stored = await _stored(store, id, "previous_response_id")
    if stored.body["status"] in ("in_progress", "cancelled", "failed"):
        message = f"The response {id!r} has no answer to go on with: it is {stored.body['status']}."
        raise ApiError(400, message, param="previous_response_id")
    return stored.conversation


async def _stored(store: ResponseStore, id: str, param: str | None = None) -> StoredResponse:
    stored = await asyncio.to_thread(store.get, id)
    if stored is None:
        raise _not_found(id, param)
    if stored.body["status"] == "in_progress" and not await asyncio.to_thread(store.is_running, id):
        # It may have ended meanwhile.
        stored = await asyncio.to_thread(store.get, id)
        if stored is None:
            raise _not_found(id, param)
        if stored.body["status"] == "in_progress":
            stored = StoredResponse(lost(stored.body), stored.items)
    return stored


def _not_found(id: str, param: str | None = None) -> ApiError:
    message = (
        f"The response {id!r} is not stored. It may run still, have been asked for with store=false, or have been "
        "dropped for newer ones (max_stored_responses, max_stored_response_bytes)."
    )
    return ApiError(404, message, param=param, code="response_not_found")
