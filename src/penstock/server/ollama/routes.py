"""Routes of Ollama's API, below `/api`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.engine.inputs.prompts import PromptDict
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.output.pooling_outputs import pooled_array
from penstock.server.http.body import BodyRoute
from penstock.server.http.errors import ApiError, json_response, refusals
from penstock.server.ollama.models import details, family, model_cards, modified_at, running_cards
from penstock.server.ollama.output import LINES, OllamaWriter, base, line
from penstock.server.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from penstock.server.ollama.request import chat_request
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.pooling import EmbeddingRequest
from penstock.server.protocol.responses import OLLAMA_RESPONSES, OllamaErrorResponse, Version, errors
from penstock.server.requests.answer import PlainAnswer
from penstock.server.requests.chat_task import ChatTask, prepare_chat
from penstock.server.requests.generation import Submission
from penstock.server.requests.sampling import chat_max_tokens, sampling_params, structured_outputs
from penstock.server.routes.common import answer, logprobs_format, served_model
from penstock.server.routes.pooling import embed
from penstock.server.served_model import ServedModel
from penstock.version import __version__


class _UntypedBodyRoute(BodyRoute):
    """Route whose body is JSON whatever its Content-Type, as `curl -d` sends it.

    Requests of browsers, which have an Origin, keep theirs: pages of other sites send JSON to allowed origins only.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_untyped(request: Request) -> Response:
            if "origin" not in request.headers:
                headers = [header for header in request.scope["headers"] if header[0] != b"content-type"]
                request.scope["headers"] = [*headers, (b"content-type", b"application/json")]
            return await handle(request)

        return handle_untyped


router = APIRouter(route_class=_UntypedBodyRoute)
_ERRORS = errors(400, 401, 404, 408, 413, 429, 500, 503, model=OllamaErrorResponse)
# What routes do that manage models, which this server does not.
_MANAGING = {
    "pull": "pull models",
    "push": "push models",
    "create": "create models",
    "copy": "copy models",
    "delete": "delete models",
    "blobs": "store files of models",
}
_LATEST = ":latest"
_LISTED = {200: {"description": "The served names."}, **errors(401)}


@router.post("/api/chat", responses=OLLAMA_RESPONSES)
async def chat(request: OllamaChatRequest, http: Request) -> Response:
    """Answer a conversation."""
    return await _generate(request, http, is_chat=True)


@router.post("/api/generate", responses=OLLAMA_RESPONSES)
async def generate(request: OllamaGenerateRequest, http: Request) -> Response:
    """Answer a prompt, or continue it with `raw`."""
    return await _generate(request, http, is_chat=False)


@router.post("/api/embed", responses={200: {"description": "The embeddings."}, **_ERRORS})
async def create_embeddings(request: OllamaEmbedRequest, http: Request) -> Response:
    """Embed one or several texts; the vectors have the length 1."""
    began_s = time.monotonic()
    outputs = await _embed(
        http,
        request.model,
        request.input,
        normalize=True,
        dimensions=request.dimensions,
        truncate_prompt_tokens=-1 if request.truncate else None,
    )
    vectors = await asyncio.to_thread(lambda: [pooled_array(one).tolist() for one in outputs])
    return json_response(
        {
            "model": request.model or served_model(http).name,
            "embeddings": vectors,
            "total_duration": int((time.monotonic() - began_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": sum(len(one.prompt_token_ids) for one in outputs),
        }
    )


@router.post("/api/embeddings", responses={200: {"description": "The embedding."}, **_ERRORS})
async def create_embedding(request: OllamaEmbeddingsRequest, http: Request) -> Response:
    """Embed one text, in the older form: the vector is as the model pools it, without normalisation."""
    prompts = [request.prompt] if request.prompt else []
    outputs = await _embed(http, request.model, prompts, normalize=False, truncate_prompt_tokens=-1)
    return json_response({"embedding": pooled_array(outputs[0]).tolist() if outputs else []})


@router.get("/api/tags", responses=_LISTED)
async def list_models(http: Request) -> Response:
    """Served names."""
    model = served_model(http)
    return json_response({"models": await asyncio.to_thread(model_cards, model, await model.all_names())})


@router.get("/api/ps", responses=_LISTED)
async def list_running(http: Request) -> Response:
    """Served names as loaded models, which they are until the server ends."""
    model = served_model(http)
    return json_response({"models": await asyncio.to_thread(running_cards, model, await model.all_names())})


@router.post("/api/show", responses={200: {"description": "What is known of the model."}, **_ERRORS})
async def show(request: OllamaShowRequest, http: Request) -> Response:
    """Template, context and capabilities of the served model."""
    model = await served_model(http).named(_own_name(request.model or request.name))
    config = model.engine.model_config
    kind = family(config)
    can_embed = config.pools
    capabilities = ["embedding"] if can_embed else ["completion"]
    options = model.options
    if not can_embed and await asyncio.to_thread(model.takes_tools):
        capabilities.append("tools")
    if options.reasoning_parser is not None:
        capabilities.append("thinking")
    template = None if can_embed else model.tokenizer.templates.own
    body = {
        "modified_at": modified_at(config),
        "template": template if isinstance(template, str) else "",
        "details": details(config),
        "model_info": {"general.architecture": kind, f"{kind}.context_length": model.max_model_len},
        "capabilities": capabilities,
    }
    return json_response(body)


@router.get("/api/version", responses={200: {"model": Version}, **errors(401)})
async def version() -> Response:
    """Version of Penstock."""
    return json_response({"version": __version__})


@router.api_route("/api/pull", methods=["POST"], include_in_schema=False)
@router.api_route("/api/push", methods=["POST"], include_in_schema=False)
@router.api_route("/api/create", methods=["POST"], include_in_schema=False)
@router.api_route("/api/copy", methods=["POST"], include_in_schema=False)
@router.api_route("/api/delete", methods=["DELETE"], include_in_schema=False)
@router.api_route("/api/blobs/{digest}", methods=["HEAD", "POST"], include_in_schema=False)
async def refuse_to_manage_models(http: Request) -> Response:
    """Refuse routes that manage models."""
    what = http.scope["route"].path.split("/")[2]
    names = ", ".join(await served_model(http).all_names())
    raise ApiError(
        404,
        f"This server cannot {_MANAGING[what]}: it serves {names} as long as it runs. For another model start a server "
        "with it, such as `penstock serve MODEL`, which fetches one that is not there.",
    )


async def _generate(request: OllamaChatRequest | OllamaGenerateRequest, http: Request, *, is_chat: bool) -> Response:
    model = await served_model(http).named(_own_name(request.model))
    name = request.model or model.name
    text = request.messages if isinstance(request, OllamaChatRequest) else request.prompt
    if not text:
        return _loaded(name, is_chat=is_chat, is_stream=request.stream)
    chat, names = chat_request(request)
    id = f"ollama-{uuid.uuid4().hex}"
    with refusals(type(request).model_fields.keys() | {"options"}, names):
        if isinstance(request, OllamaGenerateRequest) and (request.raw or model.chat_template is None):
            task = await asyncio.to_thread(_raw_task, model, request, chat, id)
        else:
            task = await prepare_chat(model, chat, id)
        form = logprobs_format(model, chat, task.submission.params.logprobs)
        writer = OllamaWriter(task, name, form, is_chat=is_chat)
        return await answer(
            http,
            model,
            [task.submission],
            writer,
            is_stream=request.stream,
            timeout_s=None,
            form=LINES,
            headers=task.headers,
        )


def _raw_task(model: ServedModel, request: OllamaGenerateRequest, chat: ChatCompletionRequest, id: str) -> ChatTask:
    """Task that continues a prompt as it is. A system prompt is put before it, as Ollama's plain template does."""
    if request.images:
        raise ApiError(400, "images are not available with raw=true, or without a chat template.", param="images")
    text = request.prompt if request.raw or not request.system else f"{request.system} {request.prompt}"
    defaults = model.default_params
    params = sampling_params(
        chat,
        defaults,
        max_tokens=chat_max_tokens(chat.max_completion_tokens, defaults),
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
    )
    prompt: PromptDict = {"prompt": text}
    return ChatTask(chat, PlainAnswer(structured_outputs(chat)), Submission(prompt, params, id))


def _loaded(model: str, *, is_chat: bool, is_stream: bool) -> Response:
    """Answer to a request without a text, by which clients load a model."""
    content: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    body = {**base(model), **content, "done": True, "done_reason": "load"}
    return Response(line(body), media_type=LINES.media_type) if is_stream else json_response(body)


async def _embed(http: Request, name: str | None, texts: str | list[str], **fields: Any) -> list[RequestOutput]:
    """Outputs of the texts; an empty list has none. fields: of the other APIs' request. Raises as `embed`."""
    model = await served_model(http).named(_own_name(name))
    if texts == []:
        return []
    _, outputs = await embed(http, EmbeddingRequest(model=model.name, input=texts, **fields))  # type: ignore[arg-type]
    return outputs


def _own_name(name: str | None) -> str | None:
    return None if name is None else name.removesuffix(_LATEST)
