"""Route `/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.contract import SamplingParams
from penstock.contract.sampling_params import ALL_LOGPROBS
from penstock.engine.inputs.prompts import Prompt, PromptDict, RenderedText, with_parts
from penstock.engine.output.outputs import CompletionOutput, RequestOutput
from penstock.server.chat_model import ChatModel
from penstock.server.http.body import BodyRoute
from penstock.server.http.connection import DONE, event
from penstock.server.http.errors import refusals
from penstock.server.protocol.completion import CompletionRequest
from penstock.server.protocol.responses import COMPLETION_RESPONSES
from penstock.server.requests.generation import Generation, Submission
from penstock.server.requests.hidden_states import beside_the_loop, hidden_states_parts
from penstock.server.requests.kv_transfer import kv_transfer_field, kv_transfer_parts
from penstock.server.requests.logprobs import CompletionLogprobs, Row, prompt_logprobs
from penstock.server.requests.samples import Usage, end_fields
from penstock.server.requests.sampling import client_names, sampling_params
from penstock.server.routes.common import answer, logprobs_format, response_base, response_id, served_model
from penstock.text.detokenizer import SpecialTokens

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions", responses=COMPLETION_RESPONSES)
async def create_completion(request: CompletionRequest, http: Request) -> Response:
    """Continue one or several prompts."""
    model = await served_model(http).named(request.model)
    id = response_id("cmpl", request)
    with refusals(type(request).model_fields, client_names(request)):
        params = await params_of(request, model.default_params)
        submissions = submissions_of(request, params, id)
        choices = CompletionChoices(model, request, params, id)
        return await answer(
            http,
            model,
            submissions,
            choices,
            is_stream=request.stream,
            timeout_s=request.timeout,
        )


async def params_of(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Parameters of a request, made in a thread where that may take long. Raises InvalidParameter."""
    if request.response_format is None and request.structured_outputs is None:
        return completion_params(request, defaults)
    # A schema may be long.
    return await asyncio.to_thread(completion_params, request, defaults)


def completion_params(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Parameters of a request. Raises InvalidParameter."""
    changes: dict[str, Any] = {"logprobs": request.logprobs}
    if request.echo and request.logprobs is not None:
        asked = (request.logprobs, request.prompt_logprobs or 0)
        changes["prompt_logprobs"] = ALL_LOGPROBS if ALL_LOGPROBS in asked else max(asked)
    if request.max_tokens == 0:
        # The engine generates one token at least, which is not returned.
        changes |= {"max_tokens": 1, "min_tokens": 0}
    return sampling_params(request, defaults, **changes)


def submissions_of(request: CompletionRequest, params: SamplingParams, id: str) -> list[Submission]:
    """Submissions of a request's prompts. Those of several prompts have the id with their index."""
    prompts = [("prompt_embeds", embeddings_prompt_of(given, request)) for given in request.prompt_embeds]
    prompts += [("prompt", prompt_of(given, request)) for given in request.texts]
    if len(prompts) == 1:
        return [Submission(prompts[0][1], params, id, request.priority)]
    firsts = {"prompt_embeds": 0, "prompt": len(request.prompt_embeds)}
    return [
        Submission(prompt, params, f"{id}-{index}", request.priority, where=f"{field}[{index - firsts[field]}]")
        for index, (field, prompt) in enumerate(prompts)
    ]


def prompt_of(given: str | list[int], request: CompletionRequest) -> Prompt:
    """Prompt of a completion request, from text or token ids."""
    prompt: PromptDict = {"cache_salt": request.cache_salt}
    if isinstance(given, str):
        prompt["prompt"] = given if request.add_special_tokens else RenderedText(given)
    else:
        prompt["prompt_token_ids"] = given
    return with_parts(prompt, [*hidden_states_parts(request), *kv_transfer_parts(request)])


def embeddings_prompt_of(given: str, request: CompletionRequest) -> Prompt:
    """Prompt of a completion request, from embeddings."""
    prompt: PromptDict = {"cache_salt": request.cache_salt, "prompt_embeds": given}
    return with_parts(prompt, [*hidden_states_parts(request), *kv_transfer_parts(request)])


class CompletionChoices:
    """Choices of one request, as a whole or in chunks. A prompt's choices have the indices from prompt * n on."""

    def __init__(self, model: ChatModel, request: CompletionRequest, params: SamplingParams, id: str) -> None:
        self._model = model
        self._request = request
        self._n = params.n
        self._skips_special = params.skip_special_tokens
        self._base = response_base(id, "text_completion", model)
        self._form = logprobs_format(model, request, request.logprobs)
        self._usage = Usage()
        self._logprobs: dict[int, CompletionLogprobs] = {}

    async def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Body of a response, from the prompts' last outputs."""
        return await beside_the_loop(self._request, self.body, outputs)

    def body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Body of a response, from the prompts' last outputs."""
        choices = []
        for index, output in enumerate(outputs):
            self._take(index, output)
            for completion in output.outputs:
                choice = self._choice(index, output, completion, is_first=True)
                choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs) if self._returns_prompt else None
                choices.append(choice)
        params = {name: value for output in outputs for name, value in kv_transfer_field(output).items()}
        return {**self._base, "choices": choices, "usage": self._usage.data(), **params}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Events of a stream."""
        request = self._request
        started: set[int] = set()
        ended: set[int] = set()
        async for index, output in generation.outputs():
            self._take(index, output)
            for completion in output.outputs:
                number = index * self._n + completion.index
                is_news = completion.token_ids or completion.text or completion.finish_reason is not None
                if number in ended or not (is_news or number not in started):
                    continue
                choice = await beside_the_loop(
                    request, self._choice, index, output, completion, is_first=number not in started
                )
                started.add(number)
                if completion.finish_reason is not None:
                    ended.add(number)
                yield event(self._chunk([choice]) | kv_transfer_field(completion))
        if request.includes_usage:
            yield event({**self._base, "choices": [], "usage": self._usage.data()})
        yield DONE

    @property
    def _returns_prompt(self) -> bool:
        return self._request.prompt_logprobs is not None

    def _take(self, index: int, output: RequestOutput) -> None:
        """Count an output, without the token that only the engine needs."""
        if self._request.max_tokens == 0:
            for completion in output.outputs:
                completion.text, completion.token_ids = "", []
                if completion.logprobs is not None:
                    completion.logprobs = []
                if completion.finish_reason == "stop":
                    completion.finish_reason, completion.stop_reason = "length", None
        self._usage.note(index, output)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._base, "choices": choices}
        if self._request.includes_usage:
            chunk["usage"] = self._usage.data() if self._request.repeats_usage else None
        return chunk

    def _choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput, *, is_first: bool
    ) -> dict[str, Any]:
        """A choice, or its next part. is_first: whether the part begins with the prompt, if that is echoed."""
        number = index * self._n + completion.index
        has_prompt = is_first and self._request.echo
        text = completion.text
        if has_prompt:
            text = self._prompt_text(index, output) + text
        choice = {
            "index": number,
            "text": text,
            "logprobs": self._logprobs_part(number, output, completion, has_prompt=has_prompt),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **end_fields(completion, self._request),
        }
        if self._request.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if is_first else None
        return choice

    def _prompt_text(self, index: int, output: RequestOutput) -> str:
        given = self._request.prompt[index]
        if isinstance(given, str) and self._request.truncate_prompt_tokens is None:
            return given
        return self._model.tokenizer.decode(output.prompt_token_ids, self._skips_special)

    def _logprobs_part(
        self, number: int, output: RequestOutput, completion: CompletionOutput, *, has_prompt: bool
    ) -> dict[str, Any] | None:
        if self._form is None:
            return None
        token_ids, rows = completion.token_ids, list[Row | None](completion.logprobs or ())
        if has_prompt:
            token_ids = [*output.prompt_token_ids, *token_ids]
            rows = [*(output.prompt_logprobs or ()), *rows]
        writer = self._logprobs.get(number)
        if writer is None:
            special = SpecialTokens(are_shown=not self._skips_special, are_spaced=True)
            before = () if self._request.echo else output.prompt_token_ids
            detokenizer = self._model.tokenizer.start_detokenizer(before, special)
            writer = self._logprobs[number] = CompletionLogprobs(self._form, detokenizer)
        return writer.part(token_ids, rows)
