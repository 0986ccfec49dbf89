"""Route `/invocations` of SageMaker: a request of another route, which its fields tell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from penstock.server.http.body import BodyRoute
from penstock.server.http.errors import ApiError
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.completion import CompletionRequest
from penstock.server.protocol.pooling import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from penstock.server.protocol.responses import STREAMED, errors
from penstock.server.routes import chat, completions, pooling
from penstock.server.routes.common import checked_request, served_model

router = APIRouter(route_class=BodyRoute)
# Routes by a field that only their requests have: the requests' model, and the function.
_ROUTES: dict[str, tuple[type[BaseModel], Callable[[Any, Request], Awaitable[Response]]]] = {
    "messages": (ChatCompletionRequest, chat.create_chat_completion),
    "prompt": (CompletionRequest, completions.create_completion),
    "text_1": (ScoreRequest, pooling.score),
    "documents": (RerankRequest, pooling.rerank),
    "input": (EmbeddingRequest, pooling.create_embedding),
}


@router.post("/invocations", responses={**STREAMED, **errors(400, 401, 404, 408, 413, 429, 500, 503)})
async def invoke(body: dict[str, Any], http: Request) -> Response:
    """Answer a request of chat completions, completions, embeddings, pooling, scores or rerank."""
    name = next((name for name in _ROUTES if body.get(name) is not None), None)
    if name is None:
        raise ApiError(400, f"The body tells no route. Allowed: one with {', '.join(_ROUTES)}.")
    kind, function = _ROUTES[name]
    config = served_model(http).engine.model_config.pooling
    if name == "input" and ("task" in body or config is None or "embed" not in config.tasks):
        kind, function = PoolingRequest, pooling.create_pooling
    return await function(checked_request(http, kind, body), http)
