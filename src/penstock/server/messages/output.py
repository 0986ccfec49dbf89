"""Answer of `/v1/messages`, as a whole or as events of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from penstock.engine.output.outputs import RequestOutput
from penstock.server.http.connection import event
from penstock.server.http.errors import messages_error
from penstock.server.requests.answer_parts import (
    AnswerParts,
    CallPart,
    Part,
    PartDelta,
    PartEnd,
    PartEvent,
    PartStart,
    ReasoningPart,
)
from penstock.server.requests.chat_task import ChatTask
from penstock.server.requests.generation import Generation
from penstock.server.requests.samples import AnswerSamples

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """Message that answers one request. id, model: of the message."""

    def __init__(self, task: ChatTask, id: str, model: str) -> None:
        self._samples = AnswerSamples(task.request, task.form, 1)
        self._parts = AnswerParts()
        self._base = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._stop_sequence: str | None = None

    async def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Body of the message, from the last output."""
        for output in outputs:
            await self._push(output)
        content = [_block(part, part.text) for part in self._parts.parts]
        return {**self._base, "content": content, **self._end(), "usage": self._usage()}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Events of a stream."""
        has_begun = False
        async for _, output in generation.outputs():
            made = await self._push(output)
            if not has_begun:
                has_begun = True
                yield _event("message_start", message=self._start())
                yield _event("ping")
            for one in made:
                for data in _part_events(one):
                    yield data
        delta = self._end()
        for one in self._parts.finish(is_cut_off=False):
            for data in _part_events(one):
                yield data
        yield _event("message_delta", delta=delta, usage=self._usage())
        yield _event("message_stop")

    async def _push(self, output: RequestOutput) -> list[PartEvent]:
        made: list[PartEvent] = []
        for _, events, completion in await self._samples.take(output):
            made += self._parts.push(events)
            if isinstance(completion.stop_reason, str):
                self._stop_sequence = completion.stop_reason
        return made

    def _start(self) -> dict[str, Any]:
        """The message at its begin."""
        usage = {**self._usage(), "output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
        return {**self._base, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _end(self) -> dict[str, Any]:
        """Fields of the message's end. Raises ApiError for an answer that was aborted."""
        sample = self._samples.ended
        reason = sample.finish_reason or ""
        is_stopped = reason == "stop" and self._stop_sequence is not None
        return {
            "stop_reason": "stop_sequence" if is_stopped else _STOP_REASONS[reason],
            "stop_sequence": self._stop_sequence if is_stopped else None,
            **sample.end_fields,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._samples.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._samples.num_reasoning_tokens},
        }


def error_event(body: dict[str, Any]) -> bytes:
    """Event of an error, from the body of an error response."""
    return event(messages_error(body), "error")


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def _part_events(made: PartEvent) -> Iterator[bytes]:
    part = made.part
    match made:
        case PartStart():
            yield _event("content_block_start", index=part.index, content_block=_block(part, ""))
        case PartDelta(_, text):
            yield _event("content_block_delta", index=part.index, delta=_delta(part, text))
        case PartEnd():
            yield _event("content_block_stop", index=part.index)


def _block(part: Part, text: str) -> dict[str, Any]:
    match part:
        case CallPart():
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": call_input(text)}
        case ReasoningPart():
            # Clients expect a signature, which there is none of here.
            return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _delta(part: Part, text: str) -> dict[str, Any]:
    match part:
        case CallPart():
            return {"type": "input_json_delta", "partial_json": text}
        case ReasoningPart():
            return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def call_input(arguments: str) -> dict[str, Any]:
    """Arguments of a call as an object: an empty one for those that are none, such as those that were cut off."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
