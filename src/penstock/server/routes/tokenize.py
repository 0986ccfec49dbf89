"""Routes `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.checkpoints.json_file import read_json_object
from penstock.engine.inputs.prompts import PromptDict
from penstock.errors import TokenizerError
from penstock.server.http.body import BodyRoute
from penstock.server.http.errors import ApiError, json_response, refusals
from penstock.server.protocol.responses import errors
from penstock.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from penstock.server.requests.conversation import render
from penstock.server.routes.common import served_model

router = APIRouter(route_class=BodyRoute)
_ERRORS = errors(400, 401, 404, 408, 413, 500)


@router.post("/tokenize", responses={200: {"model": TokenizeResponse}, **_ERRORS})
async def tokenize(request: TokenizeRequest, http: Request) -> Response:
    """Token ids of a text or of a conversation, as a request with it would have them."""
    model = await served_model(http).named(request.model)
    with refusals(request.model_fields_set):
        prompt: str | PromptDict = request.prompt or ""
        adds_special = request.messages is None
        if request.messages is not None:
            prompt = await asyncio.to_thread(render, model, request.messages, request, request.tools, {})
        if request.add_special_tokens is not None:
            adds_special = request.add_special_tokens
        token_ids = await model.engine.tokenize(prompt, add_special_tokens=adds_special)
    texts = await model.token_texts(token_ids) if request.return_token_strs else None
    body = {"count": len(token_ids), "max_model_len": model.max_model_len, "tokens": token_ids, "token_strs": texts}
    return json_response(body)


@router.get("/tokenizer_info", responses={200: {"description": "The configuration."}, **errors(401, 404)})
async def tokenizer_info(http: Request) -> Response:
    """Configuration of the tokenizer: its `tokenizer_config.json`, with its chat template."""
    tokenizer = served_model(http).tokenizer
    path = tokenizer.folder / "tokenizer_config.json"
    if not path.is_file():
        raise ApiError(404, "The tokenizer has no tokenizer_config.json, such as that of a GGUF file.")
    config = await asyncio.to_thread(read_json_object, path, TokenizerError)
    if "chat_template" not in config and (own := tokenizer.templates.own) is not None:
        config = {**config, "chat_template": own}
    return json_response({"tokenizer_class": "PreTrainedTokenizerFast", **config})


@router.post("/detokenize", responses={200: {"model": DetokenizeResponse}, **_ERRORS})
async def detokenize(request: DetokenizeRequest, http: Request) -> Response:
    """Text of token ids, special tokens included."""
    model = await served_model(http).named(request.model)
    with refusals(type(request).model_fields):
        text = await model.decode(request.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})
