"""Answers of Ollama's API, as a whole or as lines of JSON."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.engine.output.outputs import CompletionOutput, RequestOutput
from penstock.server.http.connection import StreamForm
from penstock.server.http.errors import ollama_error
from penstock.server.messages.output import call_input
from penstock.server.requests.answer_parts import (
    AnswerParts,
    CallPart,
    Part,
    PartDelta,
    PartEnd,
    PartEvent,
    ReasoningPart,
    TextPart,
)
from penstock.server.requests.chat_task import ChatTask
from penstock.server.requests.generation import Generation
from penstock.server.requests.logprobs import LogprobsFormat
from penstock.server.requests.samples import AnswerSamples

_NS = 1_000_000_000


def line(data: Any) -> bytes:
    """Line of a stream."""
    return msgspec.json.encode(data) + b"\n"


# Blank lines would be errors of clients that read each line as JSON.
LINES = StreamForm(error_event=lambda body: line(ollama_error(body)), media_type="application/x-ndjson", keep_alive=b"")


def base(model: str) -> dict[str, Any]:
    """First fields of an answer or of its lines."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


class OllamaWriter:
    """Answer to one request. model: its name. is_chat: whether the answer is a message, or a response."""

    def __init__(self, task: ChatTask, model: str, logprobs: LogprobsFormat | None, *, is_chat: bool) -> None:
        self._samples = AnswerSamples(task.request, task.form, 1)
        self._parts = AnswerParts()
        self._model = model
        self._logprobs_form = logprobs
        self._is_chat = is_chat
        self._began_s = time.monotonic()

    async def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Body of an answer, from the last output."""
        logprobs: list[Any] = []
        for output in outputs:
            logprobs += self._push(output)[1]
        end = self._end(outputs[-1])
        parts = self._parts.parts
        text, thinking = _text_of(parts, TextPart), _text_of(parts, ReasoningPart)
        calls = [_call(part) for part in parts if isinstance(part, CallPart)]
        return {**base(self._model), **self._content(text, thinking, calls), **self._logprobs(logprobs), **end}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Lines of a stream."""
        last: RequestOutput | None = None
        async for _, output in generation.outputs():
            last = output
            made, logprobs = self._push(output)
            contents = list(self._contents(made))
            if logprobs and not contents:
                contents = [self._content("", "", [])]
            for number, content in enumerate(contents):
                entries = self._logprobs(logprobs if number == 0 else [])
                yield line({**base(self._model), **content, **entries, "done": False})
        assert last is not None, "a request has a last output"
        end = self._end(last)
        for content in self._contents(self._parts.finish(is_cut_off=False)):
            yield line({**base(self._model), **content, "done": False})
        yield line({**base(self._model), **self._content("", "", []), **end})

    def _push(self, output: RequestOutput) -> tuple[list[PartEvent], list[Any]]:
        made: list[PartEvent] = []
        logprobs: list[Any] = []
        for _, events, completion in self._samples.push(output):
            made += self._parts.push(events)
            logprobs += self._entries(completion)
        return made, logprobs

    def _entries(self, completion: CompletionOutput) -> list[Any]:
        if self._logprobs_form is None:
            return []
        entries: list[Any] = self._logprobs_form.chat(completion.token_ids, completion.logprobs or ())["content"]
        return entries

    def _logprobs(self, entries: list[Any]) -> dict[str, Any]:
        return {} if self._logprobs_form is None or not entries else {"logprobs": entries}

    def _contents(self, made: Iterable[PartEvent]) -> Iterable[dict[str, Any]]:
        """Content of the lines of these events; a call is in one line, once it is whole."""
        for one in made:
            match one:
                case PartDelta(part=TextPart(), text=text):
                    yield self._content(text, "", [])
                case PartDelta(part=ReasoningPart(), text=text):
                    yield self._content("", text, [])
                case PartEnd(part=CallPart() as part):
                    yield self._content("", "", [_call(part)])

    def _content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        more = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": text, **more}
        return {"message": {"role": "assistant", "content": text, **more, **({"tool_calls": calls} if calls else {})}}

    def _end(self, output: RequestOutput) -> dict[str, Any]:
        """Fields of the answer's end. Raises ApiError for one that was aborted."""
        reason = self._samples.ended.finish_reason
        usage, metrics = self._samples.usage, output.metrics
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": int((time.monotonic() - self._began_s) * _NS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int((metrics.prefill_time_s or 0) * _NS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int((metrics.decode_time_s or 0) * _NS),
            **self._samples.samples[0].end_fields,
        }


def _text_of(parts: Sequence[Part], kind: type[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _call(part: CallPart) -> dict[str, Any]:
    return {"function": {"name": part.name, "arguments": call_input(part.text)}}
