"""Routes of TEI's API: `/embed`, `/embed_all`, `/similarity`, `/predict`, `/rerank`, `/` and `/info`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.checkpoints.pooling import PoolingConfig
from penstock.engine.inputs.field_limits import check_body
from penstock.engine.inputs.prompts import Prompt, TextPair
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.output.pooling_outputs import pooled_array
from penstock.server.http.errors import ApiError, json_response, refusals
from penstock.server.protocol.pooling import EmbeddingRequest, PoolingFields, RerankRequest, RerankResponse
from penstock.server.protocol.responses import ErrorResponse, TeiErrorResponse, TeiRank, errors
from penstock.server.routes import pooling
from penstock.server.routes.common import checked_request, served_model
from penstock.server.tei.errors import TeiRoute, tei_errors
from penstock.server.tei.protocol import (
    AnyRerankRequest,
    TeiEmbedAllRequest,
    TeiEmbedRequest,
    TeiFields,
    TeiPredictRequest,
    TeiSimilarityRequest,
)
from penstock.version import __version__

router = APIRouter(route_class=TeiRoute)
_ERRORS = errors(400, 401, 408, 413, 424, 429, 503, model=TeiErrorResponse)
_RERANK_ERRORS = errors(400, 401, 404, 408, 413, 424, 429, 500, 503, model=ErrorResponse | TeiErrorResponse)
_POOLING_NAMES = {"last": "last_token"}
# Fields of clients by those of the pooling routes.
_NAMES = {
    "sentences": "inputs.sentences",
    "input": "inputs",
    "documents": "texts",
    "truncation_side": "truncation_direction",
}


@router.post("/embed", responses={200: {"description": "A vector per text."}, **_ERRORS})
async def embed(request: TeiEmbedRequest, http: Request) -> Response:
    """Embed one or several texts."""
    with refusals(type(request).model_fields, _NAMES):
        asked = EmbeddingRequest(
            input=request.inputs,
            normalize=request.normalize,
            prompt_name=request.prompt_name,
            dimensions=request.dimensions,
            **request.truncation,
        )
        _, outputs = await pooling.embed(http, asked)
    return json_response(await asyncio.to_thread(_vectors, outputs))


@router.post("/embed_all", responses={200: {"description": "A vector per token, by text."}, **_ERRORS})
async def embed_all(request: TeiEmbedAllRequest, http: Request) -> Response:
    """Vectors of the tokens of one or several texts."""
    with refusals(type(request).model_fields, _NAMES):
        asked = EmbeddingRequest(
            input=request.inputs, normalize=False, prompt_name=request.prompt_name, **request.truncation
        )
        _, outputs = await pooling.embed(http, asked, "token_embed")
    return json_response(await asyncio.to_thread(_vectors, outputs))


@router.post("/similarity", responses={200: {"description": "A cosine per text."}, **_ERRORS})
async def similarity(request: TeiSimilarityRequest, http: Request) -> Response:
    """Cosines of a text's embedding with those of others."""
    sentences, parameters = request.inputs.sentences, request.parameters
    with refusals(("inputs", *TeiFields.model_fields), _NAMES):
        check_body({"sentences": sentences}, served_model(http).engine.request_limits)
        asked = EmbeddingRequest(
            input=[request.inputs.source_sentence, *sentences],
            normalize=True,
            prompt_name=parameters.prompt_name,
            **parameters.truncation,
        )
        _, outputs = await pooling.embed(http, asked)
    source, *others = map(pooled_array, outputs)
    return json_response([float(source @ other) for other in others])


@router.post("/predict", responses={200: {"description": "Classes of each text, the likeliest first."}, **_ERRORS})
async def predict(request: TeiPredictRequest, http: Request) -> Response:
    """Classify one or several texts, or pairs of texts."""
    given, is_single = request.inputs, _is_single(request.inputs)
    prompts = [_prompt(given)] if is_single else [_prompt(one) for one in given]
    with refusals(type(request).model_fields, _NAMES):
        asked = PoolingFields(use_activation=False if request.raw_scores else None, **request.truncation)
        config, _, outputs = await pooling.classes(http, asked, prompts, field="inputs")
    answers = [_predictions(one, config) for one in outputs]
    return json_response(answers[0] if is_single else answers)


@router.post("/rerank", responses={200: {"model": RerankResponse | list[TeiRank]}, **_RERANK_ERRORS})
async def rerank(request: AnyRerankRequest, http: Request) -> Response:
    """Rank texts by their relevance to a query, the most relevant first.

    A request with `texts` is TEI's, and its answer a list of `index` and `score`.
    """
    fields = {name: getattr(request, name) for name in RerankRequest.model_fields} | request.truncation
    if request.raw_scores:
        fields["use_activation"] = False
    if request.texts is None:
        return await pooling.rerank(RerankRequest(**fields), http)
    with tei_errors(http), refusals(type(request).model_fields, _NAMES):
        _, ranks, _ = await pooling.ranks(http, RerankRequest(**{**fields, "documents": request.texts}))
    return json_response(
        [
            {"index": index, **({"text": request.texts[index]} if request.return_text else {}), "score": score}
            for index, score in ranks
        ]
    )


@router.post("/", responses={200: {"description": "The route's answer."}, **_RERANK_ERRORS})
async def root(body: dict[str, Any], http: Request) -> Response:
    """Answer a request of `/embed`, `/predict`, `/similarity` or `/rerank`, which the body and the model tell."""
    config = served_model(http).engine.model_config.pooling
    kind: type[Any] = TeiEmbedRequest
    function: Callable[[Any, Request], Awaitable[Response]] = embed
    if "texts" in body:
        kind, function = AnyRerankRequest, rerank
    elif isinstance(body.get("inputs"), dict):
        kind, function = TeiSimilarityRequest, similarity
    elif config is not None and config.has_classes:
        kind, function = TeiPredictRequest, predict
    request = checked_request(http, kind, body)
    with tei_errors(http, has_task=config is not None):
        return await function(request, http)


@router.get("/info", responses={200: {"description": "What is known of the model."}, **errors(400, 401)})
async def info(http: Request) -> Response:
    """Name, task and context of a model that pools."""
    model = served_model(http)
    config, scheduler = model.engine.model_config, model.engine.config.scheduler
    if config.pooling is None:
        raise ApiError(400, f"The model {model.name!r} does not pool. /v1/models describes it.")
    return json_response(
        {
            "model_id": model.name,
            "model_sha": None,
            "model_dtype": config.checkpoint_dtype if config.dtype == "auto" else config.dtype,
            "model_type": _model_type(config.pooling),
            "max_input_length": model.max_model_len,
            "max_concurrent_requests": scheduler.max_num_seqs,
            "max_batch_tokens": scheduler.max_num_batched_tokens,
            "max_batch_requests": scheduler.max_num_seqs,
            "max_client_batch_size": model.engine.request_limits.max_request_items,
            "tokenization_workers": 1,
            "auto_truncate": False,
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
    )


def _vectors(outputs: list[RequestOutput]) -> list[Any]:
    """JSON of the vectors, one by one: many take long, and other threads have their turns between."""
    return [msgspec.Raw(msgspec.json.encode(pooled_array(one).tolist())) for one in outputs]


def _is_single(inputs: str | list[str] | list[list[str]]) -> bool:
    return isinstance(inputs, str) or isinstance(inputs[0], str)


def _prompt(given: str | Sequence[str] | Sequence[list[str]]) -> Prompt:
    if isinstance(given, str):
        return given
    first, *rest = (str(text) for text in given)
    return TextPair(first, *rest) if rest else first


def _predictions(output: RequestOutput, config: PoolingConfig) -> list[dict[str, Any]]:
    scores = pooled_array(output).tolist()
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [{"score": scores[index], "label": config.labels[index]} for index in ranked]


def _model_type(config: PoolingConfig) -> dict[str, Any]:
    if not config.has_classes:
        return {"embedding": {"pooling": _POOLING_NAMES.get(config.pooling, config.pooling)}}
    names: dict[str, Any] = {"id2label": {str(id): label for id, label in enumerate(config.labels)}}
    names["label2id"] = {label: id for id, label in enumerate(config.labels)}
    return {"reranker" if "score" in config.tasks else "classifier": names}
