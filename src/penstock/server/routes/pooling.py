"""Routes `/v1/embeddings`, `/v1/score`, `/v1/rerank`, `/classify` and `/pooling`, and their other names.

`/rerank` is in `penstock.server.tei`, since it takes two kinds of requests.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.checkpoints.pooling import PoolingConfig
from penstock.contract import PoolingParams
from penstock.engine.inputs.field_limits import check_pairs
from penstock.engine.inputs.pooling_prompts import (
    check_task,
    conversation_prompt,
    named_prompt,
    pairs_of,
    score_prompts,
)
from penstock.engine.inputs.prompts import Prompt, RenderedText
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.output.pooling_outputs import pooled_array
from penstock.engine.pair_scores import PairScores
from penstock.errors import InvalidParameter, InvalidRequest
from penstock.server.http.body import BodyRoute
from penstock.server.http.errors import ApiError, json_response, refusals
from penstock.server.protocol import pooling as protocol
from penstock.server.protocol.responses import errors
from penstock.server.requests.generation import PoolingSubmission
from penstock.server.routes.common import response_base, response_id, served_model, whole_outputs

router = APIRouter(route_class=BodyRoute)
ERRORS = errors(400, 401, 404, 408, 413, 429, 500, 503)


@router.post("/v1/embeddings", responses={200: {"model": protocol.EmbeddingResponse}, **ERRORS})
async def create_embedding(request: protocol.EmbeddingRequest, http: Request) -> Response:
    """Embed one or several texts."""
    with refusals(type(request).model_fields):
        id, outputs = await embed(http, request)
        data = await asyncio.to_thread(_data, outputs, "embedding", "embedding", request.encoding_format)
        return _listed(http, id, data, outputs)


@router.post("/pooling", responses={200: {"model": protocol.PoolingResponse}, **ERRORS})
async def create_pooling(request: protocol.PoolingRequest, http: Request) -> Response:
    """Pool one or several texts by any of the model's tasks."""
    with refusals(type(request).model_fields):
        pooling = await _pooling(http, request, request.task)
        params = _params(request, request.task or pooling.tasks[0], dimensions=request.dimensions)
        id, outputs = await _run(http, request, "pool", _prompts(request), params)
        data = await asyncio.to_thread(_data, outputs, "pooling", "data", request.encoding_format)
        return _listed(http, id, data, outputs)


@router.post("/classify", responses={200: {"model": protocol.ClassifyResponse}, **ERRORS})
async def classify(request: protocol.ClassifyRequest, http: Request) -> Response:
    """Classify one or several texts: the likeliest label, and a probability per class."""
    with refusals(type(request).model_fields):
        pooling, id, outputs = await classes(http, request, _prompts(request))
        data = [_classified(index, pooled_array(one), pooling) for index, one in enumerate(outputs)]
        return _listed(http, id, data, outputs)


@router.post("/score", responses={200: {"model": protocol.ScoreResponse}, **ERRORS})
@router.post("/v1/score", responses={200: {"model": protocol.ScoreResponse}, **ERRORS})
async def score(request: protocol.ScoreRequest, http: Request) -> Response:
    """Score pairs of texts."""
    with refusals(type(request).model_fields):
        pairs = pairs_of("text_1", request.text_1, "text_2", request.text_2)
        id, scores, outputs = await _scores(http, request, "score", pairs, request.chat_template)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        return _listed(http, id, data, outputs)


@router.post("/v1/rerank", responses={200: {"model": protocol.RerankResponse}, **ERRORS})
@router.post("/v2/rerank", responses={200: {"model": protocol.RerankResponse}, **ERRORS})
async def rerank(request: protocol.RerankRequest, http: Request) -> Response:
    """Rank documents by their relevance to a query, the most relevant first."""
    with refusals(type(request).model_fields):
        id, ranked, outputs = await ranks(http, request)
        results = []
        for index, score in ranked:
            result: dict[str, Any] = {"index": index, "relevance_score": score}
            if request.return_documents:
                result["document"] = {"text": request.documents[index]}
            results.append(result)
        body = {"id": id, "model": served_model(http).name, "usage": _usage(outputs), "results": results}
        return json_response(body)


async def ranks(
    http: Request, request: protocol.RerankRequest
) -> tuple[str, list[tuple[int, float]], list[RequestOutput]]:
    """Name of the response, number and score of the documents from the most relevant on, and the engine's outputs.

    Raises InvalidRequest.
    """
    if not request.documents:
        raise InvalidRequest("documents is empty. Give at least one text.")
    if request.top_n is not None and request.top_n < 0:
        raise InvalidParameter(f"top_n={request.top_n} is not valid. Allowed: 0 or more; 0 for all documents.")
    pairs = [(request.query, document) for document in request.documents]
    id, scores, outputs = await _scores(http, request, "rerank", pairs, request.chat_template)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
    return id, [(index, scores[index]) for index in order], outputs


async def embed(
    http: Request, request: protocol.EmbeddingRequest, task: str = "embed"
) -> tuple[str, list[RequestOutput]]:
    """Name of the response, and the texts' outputs. Raises InvalidRequest."""
    pooling = await _pooling(http, request, task)
    if request.messages is None:
        prompts = [named_prompt(pooling, prompt, request.prompt_name) for prompt in _prompts(request)]
    else:
        prompts = [await asyncio.to_thread(_conversation, http, pooling, request)]
    activation = request.normalize if request.use_activation is None else request.use_activation
    params = _params(request, task, dimensions=request.dimensions, use_activation=activation)
    return await _run(http, request, "embd", prompts, params)


async def classes(
    http: Request, request: protocol.PoolingFields, prompts: Sequence[Prompt], field: str = "input"
) -> tuple[PoolingConfig, str, list[RequestOutput]]:
    """Classes of the model, name of the response, and the texts' outputs. field: of the texts."""
    pooling = await _pooling(http, request, "classify")
    id, outputs = await _run(http, request, "classify", prompts, _params(request, "classify"), field=field)
    return pooling, id, outputs


async def _pooling(http: Request, request: protocol.PoolingFields, *tasks: str | None) -> PoolingConfig:
    model = await served_model(http).named(request.model)
    return check_task(model.engine.model_config, *tasks)


def _params(request: protocol.PoolingFields, task: str, **more: Any) -> PoolingParams:
    fields = {name: getattr(request, name) for name in ("truncate_prompt_tokens", "truncation_side", "use_activation")}
    return PoolingParams(task=task, **{**fields, **more})


def _conversation(http: Request, pooling: PoolingConfig, request: protocol.EmbeddingRequest) -> Prompt:
    tokenizer = served_model(http).tokenizer
    return conversation_prompt(
        tokenizer, pooling, request.messages or (), add_generation_prompt=request.add_generation_prompt
    )


def _prompts(request: protocol.EmbeddingRequest | protocol.PoolingRequest | protocol.ClassifyRequest) -> list[Prompt]:
    if request.add_special_tokens:
        return list(request.input)
    return [RenderedText(given) if isinstance(given, str) else given for given in request.input]


async def _run(
    http: Request,
    request: protocol.PoolingFields,
    kind: str,
    prompts: Sequence[Prompt],
    *params: PoolingParams,
    field: str = "input",
) -> tuple[str, list[RequestOutput]]:
    """Name of the response, and the prompts' outputs. params: one for all, or one each. field: of the prompts.

    Raises ApiError for a request that failed.
    """
    id = response_id(kind, request)
    of_each = params if len(params) > 1 else params * len(prompts)
    submissions = [
        PoolingSubmission(
            prompt,
            one,
            id if len(prompts) == 1 else f"{id}-{index}",
            request.priority,
            where=f"{field}[{index}]" if field and len(prompts) > 1 else "",
        )
        for index, (prompt, one) in enumerate(zip(prompts, of_each, strict=True))
    ]
    model = await served_model(http).named(request.model)
    outputs = await whole_outputs(http, submissions, request.timeout, model.parts)
    for output in outputs:
        if output.pooled_data is None:
            raise ApiError(500, output.error or "The request was aborted.", code="generation_failed")
    return id, outputs


async def _scores(
    http: Request,
    request: protocol.PoolingFields,
    kind: str,
    pairs: Sequence[tuple[str, str]],
    template: str | None,
) -> tuple[str, list[float], list[RequestOutput]]:
    """Name of the response, score of each pair, and the engine's outputs."""
    pooling = await _pooling(http, request, "score", "embed", "token_embed")
    model = served_model(http)
    field = "documents" if isinstance(request, protocol.RerankRequest) else "text_2"
    if template is not None and not model.options.trust_request_chat_template:
        message = "chat_template is not accepted from requests. Start the server with trust_request_chat_template."
        raise ApiError(400, message, param="chat_template")
    check_pairs(pairs, model.engine.request_limits)
    if "score" in pooling.tasks:
        prompts = await asyncio.to_thread(score_prompts, model.tokenizer, pairs, template)
        id, outputs = await _run(http, request, kind, prompts, _params(request, "score"), field=field)
        return id, [float(pooled_array(one)[0]) for one in outputs], outputs
    task = PairScores.task(pooling)
    of_pairs = await asyncio.to_thread(PairScores, pooling, model.tokenizer, pairs, _params(request, task))
    id, outputs = await _run(http, request, kind, of_pairs.prompts, *of_pairs.params, field="")
    return id, await asyncio.to_thread(of_pairs.values, outputs), outputs


def _classified(index: int, probs: np.ndarray, pooling: PoolingConfig) -> dict[str, Any]:
    label = pooling.labels[int(probs.argmax())]
    return {"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)}


def _data(outputs: Sequence[RequestOutput], kind: str, field: str, encoding: str) -> list[Any]:
    """Entries of a response as JSON, one by one: many vectors take long, and other threads have their turns between."""
    return [
        msgspec.Raw(msgspec.json.encode({"index": index, "object": kind, field: _encoded(pooled_array(one), encoding)}))
        for index, one in enumerate(outputs)
    ]


def _encoded(array: np.ndarray, encoding: str) -> list[Any] | str:
    if encoding == "float":
        values: list[Any] = array.tolist()
        return values
    return base64.b64encode(array.astype("<f4", copy=False).tobytes()).decode("ascii")


def _listed(http: Request, id: str, data: list[Any], outputs: Sequence[RequestOutput]) -> Response:
    return json_response({**response_base(id, "list", served_model(http)), "data": data, "usage": _usage(outputs)})


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
