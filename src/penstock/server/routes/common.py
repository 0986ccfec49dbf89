"""Parts that the generating routes share: names of requests, and the running of a generation."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from penstock.contract import Part, RequestOutputKind
from penstock.engine.output.outputs import RequestOutput
from penstock.server.chat_model import ChatModel
from penstock.server.http.connection import EventStream, StreamForm, while_connected
from penstock.server.http.context import request_id_of
from penstock.server.http.errors import ApiError, json_response
from penstock.server.http.unknown_fields import UnknownFields
from penstock.server.http.validation import validation_error
from penstock.server.protocol.base import SamplingFields
from penstock.server.protocol.pooling import PoolingFields
from penstock.server.requests.chat_task import ChatTask
from penstock.server.requests.generation import Generation, PoolingSubmission, Submission
from penstock.server.requests.logprobs import LogprobsFormat
from penstock.server.requests.output_log import OutputLog
from penstock.server.served_model import ServedModel

logger = logging.getLogger(__name__)
# Prompts of one request that are submitted together, so that a large one does not fill the queue by itself.
_PROMPTS_AT_ONCE = 1024
_EVENTS = StreamForm()
_Request = TypeVar("_Request", bound=BaseModel)


def served_model(request: Request) -> ServedModel:
    """The model that the app of this request serves."""
    model: ServedModel = request.app.state.served_model
    return model


def checked_request(http: Request, kind: type[_Request], body: dict[str, Any]) -> _Request:
    """Request of this kind, of a route that takes several. Raises ApiError for a body that is none."""
    unknown: UnknownFields = http.app.state.unknown_fields
    given = unknown.without(body, kind)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise validation_error(found, given, kind.model_fields) from error


def response_id(prefix: str, request: SamplingFields | PoolingFields) -> str:
    return f"{prefix}-{request.request_id or uuid.uuid4().hex}"


def response_base(id: str, kind: str, model: ChatModel) -> dict[str, Any]:
    """First fields of a response or of its chunks. kind: its `object`."""
    return {"id": id, "object": kind, "created": int(time.time()), "model": model.name}


def list_page(items: list[dict[str, Any]], limit: int, after: str | None, of: str = "the list") -> Response:
    """Page of a list, as OpenAI's API has them: the items behind the one with the id after, at most limit.

    of: the list, for the error. Raises ApiError for an id that is not in the list.
    """
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ApiError(400, f"after={after!r} is no item of {of}.", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    body = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
    return json_response(body)


def logprobs_format(model: ChatModel, request: SamplingFields, most: int | None) -> LogprobsFormat | None:
    """Format of a request's log-probabilities. most: top ones per token; None if they are not requested."""
    if most is None:
        return None
    asked = request.return_tokens_as_token_ids
    names_ids = model.options.return_tokens_as_token_ids if asked is None else asked
    return LogprobsFormat(model.tokenizer, most, names_ids=names_ids)


class AnswerWriter(Protocol):
    """Writer of one response, as a whole or as a stream."""

    async def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Body of a whole response, from the last outputs."""

    def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Events of a stream."""


async def answer_chat(
    http: Request, model: ServedModel, task: ChatTask, writer: AnswerWriter, form: StreamForm = _EVENTS
) -> Response:
    """Generate the answer of a chat request. See `answer`."""
    request = task.request
    return await answer(
        http,
        model,
        [task.submission],
        writer,
        is_stream=request.stream,
        timeout_s=request.timeout,
        form=form,
        headers=task.headers,
    )


async def answer(
    http: Request,
    model: ServedModel,
    submissions: Sequence[Submission],
    writer: AnswerWriter,
    *,
    is_stream: bool,
    timeout_s: float | None,
    form: StreamForm = _EVENTS,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Generate, and respond with a stream or a whole answer.

    model: the one that the request names. timeout_s: as in `Generation`. form: of the stream. headers: further ones of
    the response.
    Raises InvalidRequest, Overloaded and other refusals of the engine.
    """
    if model.options.log_prompts:
        for submission in submissions:
            logger.info("%s %s %s", request_id_of(http.scope), submission.prompt, submission.params)
    kind = RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY
    generation = Generation(
        model.engine,
        submissions,
        output_kind=kind,
        timeout_s=timeout_s,
        parts=model.parts,
        trace=model.tracing.begin(http.scope, model.name),
        log=OutputLog(request_id_of(http.scope)) if model.options.enable_log_outputs else None,
    )
    if not is_stream:
        async with generation:
            body = await writer.whole(await while_connected(http.receive, _finals(generation)))
            return json_response(body, headers=headers)
    await while_connected(http.receive, generation.start())
    stream = EventStream(
        writer.events(generation),
        backlog=generation,
        on_end=generation.close,
        request_id=request_id_of(http.scope),
        keep_alive_s=model.options.keep_alive_interval_s,
        form=form,
    )
    stream.headers.update(headers or {})
    return stream


async def whole_outputs(
    http: Request,
    submissions: Sequence[Submission | PoolingSubmission],
    timeout_s: float | None,
    parts: Sequence[Part] = (),
) -> list[RequestOutput]:
    """Last outputs of the prompts, which have these parts. Raises as `answer`."""
    model = served_model(http)
    if model.options.log_prompts:
        for submission in submissions:
            logger.info("%s %s %s", request_id_of(http.scope), submission.prompt, submission.params)
    kind = RequestOutputKind.FINAL_ONLY
    trace = model.tracing.begin(http.scope, model.name)

    async def finals() -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        begin_s = asyncio.get_running_loop().time()
        for begin in range(0, len(submissions), _PROMPTS_AT_ONCE):
            async with Generation(
                model.engine,
                submissions[begin : begin + _PROMPTS_AT_ONCE],
                output_kind=kind,
                timeout_s=timeout_s,
                begin_s=begin_s,
                parts=parts,
                trace=trace,
            ) as generation:
                outputs += await _finals(generation)
        return outputs

    return await while_connected(http.receive, finals())


async def _finals(generation: Generation) -> list[RequestOutput]:
    await generation.start()
    return await generation.finals()
