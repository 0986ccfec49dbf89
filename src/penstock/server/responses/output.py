"""Response of `/v1/responses`, as a whole or as events of a stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from penstock.contract import SamplingParams
from penstock.engine.output.outputs import CompletionOutput, RequestOutput
from penstock.server.http.connection import event
from penstock.server.http.errors import ApiError
from penstock.server.protocol.responses_request import ResponsesRequest
from penstock.server.requests.chat_task import ChatTask
from penstock.server.requests.generation import Generation
from penstock.server.requests.logprobs import LogprobsFormat
from penstock.server.requests.samples import AnswerSamples
from penstock.server.responses.output_items import OutputItems


class ResponseWriter:
    """Response to one request.

    base: first fields of its body. logprobs: format of log-probabilities, or None. on_end: called with the body of a
    response that has its answer, before the client gets it.
    """

    def __init__(
        self,
        task: ChatTask,
        base: dict[str, Any],
        logprobs: LogprobsFormat | None,
        on_end: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        self._samples = AnswerSamples(task.request, task.form, 1)
        self._items = OutputItems()
        self._base = base
        self._logprobs_form = logprobs
        self._on_end = on_end
        self._sequence = itertools.count()

    async def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Body of the response, from the last output."""
        for output in outputs:
            await self._push(output)
        return await self._end()

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Events of a stream. Failures of the generation are the event `response.failed`."""
        yield self._event("response.created", {"response": self.begun()})
        yield self._event("response.in_progress", {"response": self.begun()})
        try:
            async for _, output in generation.outputs():
                for name, data in await self._push(output):
                    yield self._event(name, data)
            for name, data in self._items.finish(is_cut_off=self._status == "incomplete"):
                yield self._event(name, data)
            body = await self._end()
        except ApiError as error:
            body = self.failed(error)
        yield self._event(f"response.{body['status']}", {"response": body})

    def begun(self) -> dict[str, Any]:
        """Body of the response while it runs."""
        return self._body("in_progress")

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Body of the response if it fails."""
        body = self._body("failed")
        body["error"] = {"code": error.code or "server_error", "message": error.message}
        return body

    def error_event(self, body: dict[str, Any]) -> bytes:
        """Event of an error of the server, from the body of an error response."""
        error = body["error"]
        data = {"code": error["code"] or error["type"], "message": error["message"], "param": error["param"]}
        return self._event("error", data)

    async def _push(self, output: RequestOutput) -> list[tuple[str, dict[str, Any]]]:
        return [
            named
            for _, events, completion in await self._samples.take(output)
            for named in self._items.push(events, self._logprobs(completion))
        ]

    def _logprobs(self, completion: CompletionOutput) -> list[Any]:
        if self._logprobs_form is None:
            return []
        entries: list[Any] = self._logprobs_form.chat(completion.token_ids, completion.logprobs or ())["content"]
        return entries

    async def _end(self) -> dict[str, Any]:
        self._items.finish(is_cut_off=self._status == "incomplete")
        body = self._body(self._status)
        if body["status"] == "incomplete":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        body["completed_at"] = int(time.time())
        await self._on_end(body)
        return body

    @property
    def _status(self) -> str:
        """Status at the end. Raises ApiError for an answer that was aborted."""
        return "incomplete" if self._samples.ended.finish_reason == "length" else "completed"

    def _body(self, status: str) -> dict[str, Any]:
        has_begun = bool(self._samples.samples)
        return {
            **self._base,
            "status": status,
            "output": self._items.whole(),
            "usage": self._usage() if has_begun and status != "in_progress" else None,
            **(self._samples.samples[0].end_fields if has_begun else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._samples.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._samples.num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _event(self, name: str, data: dict[str, Any]) -> bytes:
        return event({"type": name, "sequence_number": next(self._sequence), **data}, name)


def response_body(
    request: ResponsesRequest, params: SamplingParams, *, id: str, model: str, stores: bool
) -> dict[str, Any]:
    """Fields of a response that its request decides. stores: whether it will be stored."""
    form: dict[str, Any] = {"type": "text"}
    if request.text is not None and request.text.format is not None:
        form = request.text.format.model_dump(by_alias=True, exclude_none=True)
    reasoning = request.reasoning
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "model": model,
        "background": request.background,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None,
            "mode": "standard",
        },
        "service_tier": "default",
        "store": stores,
        "temperature": params.temperature,
        "text": {"format": form},
        "tool_choice": request.tool_choice or "auto",
        "tools": [{"description": None, "parameters": None, "strict": None, **tool} for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
    }
