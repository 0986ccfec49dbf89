"""Route `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.contract import SamplingParams
from penstock.engine.output.outputs import CompletionOutput, RequestOutput
from penstock.server.chat_model import ChatModel
from penstock.server.http.body import BodyRoute
from penstock.server.http.connection import DONE, event
from penstock.server.http.errors import refusals
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.responses import CHAT_RESPONSES
from penstock.server.requests.answer import (
    AnswerEvent,
    AnswerFormat,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from penstock.server.requests.chat_task import chat_client_names, prepare_chat
from penstock.server.requests.generation import Generation
from penstock.server.requests.hidden_states import beside_the_loop
from penstock.server.requests.kv_transfer import kv_transfer_field
from penstock.server.requests.logprobs import prompt_logprobs
from penstock.server.requests.samples import Answer, AnswerSample, AnswerSamples, SamplePart
from penstock.server.routes.common import answer_chat, logprobs_format, response_base, response_id, served_model

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", responses=CHAT_RESPONSES)
async def create_chat_completion(request: ChatCompletionRequest, http: Request) -> Response:
    """Answer a conversation."""
    model = await served_model(http).named(request.model)
    id = response_id("chatcmpl", request)
    with refusals(type(request).model_fields, chat_client_names(request)):
        task = await prepare_chat(model, request, id)
        choices = ChatChoices(model, request, task.form, task.submission.params, id)
        return await answer_chat(http, model, task, choices)


class ChatChoices:
    """Choices of one request, as a whole or in chunks."""

    def __init__(
        self,
        model: ChatModel,
        request: ChatCompletionRequest,
        form: AnswerFormat,
        params: SamplingParams,
        id: str,
    ) -> None:
        self._request = request
        self._samples = AnswerSamples(request, form, params.n)
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self._base = response_base(id, kind, model)
        self._logprobs_form = logprobs_format(model, request, params.logprobs)
        last = request.messages[-1]
        self._role = model.options.response_role if request.begins_message else last.role
        # Text of the message that the answer goes on with.
        self._echoed = last.text if request.echo and not request.begins_message else None

    async def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Body of a response, from the last outputs."""
        (output,) = outputs
        return await beside_the_loop(self._request, self.body, output)

    def body(self, output: RequestOutput) -> dict[str, Any]:
        """Body of a response, from the last output."""
        choices = [self._whole_choice(part) for part in self._samples.push(output)]
        body = {**self._base, "choices": choices, "usage": self._samples.usage_data()}
        body |= kv_transfer_field(output)
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._request.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        return body

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Events of a stream."""
        has_begun = False
        async for _, output in generation.outputs():
            parts = await self._samples.take(output)
            if not has_begun:
                has_begun = True
                for sample in self._samples.samples:
                    yield event(self._first_chunk(sample, output))
            for part in parts:
                for chunk in self._chunks(part):
                    yield event(chunk)
        if self._request.includes_usage:
            yield event({**self._base, "choices": [], "usage": self._samples.usage_data()})
        yield DONE

    def _shown(self, events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
        """Events that the response has."""
        if self._request.include_reasoning:
            return list(events)
        return [event for event in events if not isinstance(event, ReasoningDelta)]

    def _whole_choice(self, part: SamplePart) -> dict[str, Any]:
        sample, events, completion = part
        answer = Answer.of(self._shown(events))
        message: dict[str, Any] = {"role": self._role, "content": answer.content, "refusal": None}
        if self._echoed is not None:
            message["content"] = f"{self._echoed}{answer.content or ''}"
        if answer.content is None and not answer.tool_calls and answer.reasoning is None:
            message["content"] = self._echoed or ""
        if answer.reasoning is not None:
            message |= _reasoning(answer.reasoning)
        if answer.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.tool_calls
            ]
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": sample.finish_reason,
            "stop_reason": completion.stop_reason,
            **sample.end_fields,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _first_chunk(self, sample: AnswerSample, output: RequestOutput) -> dict[str, Any]:
        chunk = self._chunk(sample, {"role": self._role, "content": self._echoed or ""})
        if self._request.return_token_ids:
            chunk["prompt_token_ids"] = output.prompt_token_ids
        return chunk

    def _chunks(self, part: SamplePart) -> list[dict[str, Any]]:
        """Chunks of a sample's next part. Log-probabilities and token ids are in the first of them."""
        sample, events, completion = part
        deltas = [_delta(event) for event in self._shown(events)]
        logprobs = self._logprobs(completion)
        returned = completion.token_ids if self._request.return_token_ids else []
        if not deltas and completion.token_ids and (logprobs is not None or returned):
            deltas = [{"content": ""}]
        chunks = [self._chunk(sample, delta) for delta in deltas]
        if chunks:
            choice = chunks[0]["choices"][0]
            choice["logprobs"] = logprobs
            if self._request.return_token_ids:
                choice["token_ids"] = returned
        if sample.finish_reason is not None:
            chunks.append(self._chunk(sample, {}, completion))
        return chunks

    def _chunk(
        self, sample: AnswerSample, delta: dict[str, Any], ended: CompletionOutput | None = None
    ) -> dict[str, Any]:
        choice = {"index": sample.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if ended is not None:
            choice |= {"finish_reason": sample.finish_reason, "stop_reason": ended.stop_reason}
            choice |= sample.end_fields
        chunk = {**self._base, "choices": [choice]}
        if ended is not None:
            chunk |= kv_transfer_field(ended)
        if self._request.includes_usage:
            chunk["usage"] = self._samples.usage_data() if self._request.repeats_usage else None
        return chunk

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if self._logprobs_form is None:
            return None
        return self._logprobs_form.chat(completion.token_ids, completion.logprobs or ())


def _delta(event: AnswerEvent) -> dict[str, Any]:
    match event:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return _reasoning(text)
        case ToolCallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _reasoning(text: str) -> dict[str, Any]:
    """Reasoning by both names that clients read."""
    return {"reasoning": text, "reasoning_content": text}
