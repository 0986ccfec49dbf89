"""Routes with tokens: `/inference/v1/generate`, and both `render`, whose answers are requests of it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.contract import SamplingParams
from penstock.engine.inputs.prompts import DATA, PROMPT_EMBEDS, PromptDict, RenderedText, has_field, with_parts
from penstock.engine.output.outputs import CompletionOutput, RequestOutput
from penstock.server.http.body import BodyRoute
from penstock.server.http.connection import DONE, event
from penstock.server.http.errors import ApiError, json_response, refusals
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.completion import CompletionRequest
from penstock.server.protocol.responses import STREAMED_TOKENS, errors
from penstock.server.protocol.tokens import GenerateRequest
from penstock.server.requests.chat_task import chat_client_names, prepare_chat
from penstock.server.requests.generation import Generation, Submission
from penstock.server.requests.kv_transfer import kv_transfer_field, kv_transfer_parts
from penstock.server.requests.logprobs import LogprobsFormat, prompt_logprobs
from penstock.server.requests.samples import Usage, notes_at_end
from penstock.server.requests.sampling import client_names
from penstock.server.routes.common import answer, response_id, served_model
from penstock.server.routes.completions import params_of, submissions_of
from penstock.server.served_model import ServedModel

router = APIRouter(route_class=BodyRoute)
_RENDERED: dict[int | str, dict[str, Any]] = {
    200: {"description": "A request of /inference/v1/generate."},
    **errors(400, 401, 404, 408, 413, 500),
}
_DEFAULTS = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))


@router.post("/inference/v1/generate", responses=STREAMED_TOKENS)
async def generate(request: GenerateRequest, http: Request) -> Response:
    """Continue token ids with token ids."""
    model = await served_model(http).named(request.model)
    id = request.request_id or uuid.uuid4().hex
    with refusals(type(request).model_fields, {name: f"sampling_params.{name}" for name in _DEFAULTS}):
        params = _params(model, request)
        given: PromptDict = {"prompt_token_ids": request.token_ids, "cache_salt": request.cache_salt}
        prompt = with_parts(given, kv_transfer_parts(request))
        choices = _TokenChoices(model, request, params, id)
        return await answer(
            http,
            model,
            [Submission(prompt, params, id, request.priority)],
            choices,
            is_stream=request.stream,
            timeout_s=None,
        )


@router.post("/v1/chat/completions/render", responses=_RENDERED)
async def render_chat(request: ChatCompletionRequest, http: Request) -> Response:
    """Tokens and sampling parameters of a conversation."""
    model = await served_model(http).named(request.model)
    with refusals(type(request).model_fields, chat_client_names(request)):
        task = await prepare_chat(model, request, response_id("chatcmpl", request))
        return json_response(await _rendered(model, task.submission, request))


@router.post("/v1/completions/render", responses=_RENDERED)
async def render_completion(request: CompletionRequest, http: Request) -> Response:
    """Tokens and sampling parameters of one or several prompts, as a list."""
    model = await served_model(http).named(request.model)
    id = response_id("cmpl", request)
    with refusals(type(request).model_fields, client_names(request)):
        params = await params_of(request, model.default_params)
        submissions = submissions_of(request, params, id)
        return json_response([await _rendered(model, one, request) for one in submissions])


async def _rendered(
    model: ServedModel, submission: Submission, request: ChatCompletionRequest | CompletionRequest
) -> dict[str, Any]:
    """Request of `/inference/v1/generate` that a submission is equal to. Raises ApiError for one that has none."""
    if request.return_hidden_states:
        message = "return_hidden_states is not available: the answers of /inference/v1/generate have no hidden states."
        raise ApiError(400, message, param="return_hidden_states")
    prompt: Any = submission.prompt
    if has_field(prompt, DATA) or has_field(prompt, PROMPT_EMBEDS):
        message = "Images, audio, video and embeddings are not available: /inference/v1/generate takes tokens alone."
        raise ApiError(400, message)
    token_ids = prompt.get("prompt_token_ids")
    if token_ids is None:
        text = prompt["prompt"]
        token_ids = await model.engine.tokenize(str(text), add_special_tokens=not isinstance(text, RenderedText))
    if (most := submission.params.truncate_prompt_tokens) is not None:
        token_ids = token_ids[-(model.max_model_len - 1 if most == -1 else most) :]
    body = {
        "request_id": submission.request_id,
        "token_ids": token_ids,
        "sampling_params": _plain(submission.params),
        "model": model.name,
        "stream": request.stream,
        "priority": submission.priority,
    }
    if request.stream_options is not None:
        body["stream_options"] = request.stream_options.model_dump()
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.kv_transfer_params is not None:
        body["kv_transfer_params"] = request.kv_transfer_params
    return body


def _plain(params: SamplingParams) -> dict[str, Any]:
    """Parameters that are not the defaults, as plain data; the prompt is truncated already."""
    plain: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if name in ("truncate_prompt_tokens", "output_kind") or value == default:
            continue
        if name == "structured_outputs":
            given = msgspec.to_builtins(value)
            plain[name] = {key: one for key, one in given.items() if one not in (None, False)}
        else:
            plain[name] = msgspec.to_builtins(value, str_keys=True)
    # Without it, the answer has as many tokens as fit.
    if params.max_tokens is not None:
        plain["max_tokens"] = params.max_tokens
    return {name: value for name, value in plain.items() if value is not None}


def _params(model: ServedModel, request: GenerateRequest) -> SamplingParams:
    """Parameters of a request. Raises InvalidParameter."""
    given: dict[str, Any] = {
        "max_tokens": None,
        **{name: one for name, one in request.sampling_params.items() if one is not None},
    }
    biases: Any = given.get("logit_bias")
    if isinstance(biases, dict):
        given["logit_bias"] = {int(id) if id.isdecimal() else id: bias for id, bias in biases.items()}
    return model.default_params.clone(**given)


class _TokenChoices:
    """Choices of one request, as a whole or in chunks."""

    def __init__(self, model: ServedModel, request: GenerateRequest, params: SamplingParams, id: str) -> None:
        self._request = request
        self._base = {"request_id": id}
        self._usage = Usage()
        most = params.logprobs
        self._form = None if most is None else LogprobsFormat(model.tokenizer, most, names_ids=True)

    async def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Body of a response, from the last output."""
        (output,) = outputs
        choices = [self._choice(completion) for completion in output.outputs]
        body: dict[str, Any] = {**self._base, "choices": choices, **kv_transfer_field(output)}
        if output.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return body

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Events of a stream."""
        ended: set[int] = set()
        async for _, output in generation.outputs():
            self._usage.note(0, output)
            for completion in output.outputs:
                is_news = completion.token_ids or completion.finish_reason is not None
                if not is_news or completion.index in ended:
                    continue
                if completion.finish_reason is not None:
                    ended.add(completion.index)
                yield event({**self._base, "choices": [self._choice(completion)], **kv_transfer_field(completion)})
        if self._request.includes_usage:
            yield event({**self._base, "choices": [], "usage": self._usage.data()})
        yield DONE

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        logprobs = None if self._form is None else self._form.chat(completion.token_ids, completion.logprobs or ())
        return {
            "index": completion.index,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "token_ids": completion.token_ids,
            **notes_at_end(completion),
        }
