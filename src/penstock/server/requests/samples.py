"""Samples of an HTTP request: usage, and answers in parts, for every API that streams or returns them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from penstock.engine.output.outputs import CompletionOutput, RequestOutput
from penstock.server.http.errors import ApiError
from penstock.server.protocol.base import GenerationFields
from penstock.server.requests.answer import (
    AnswerEvent,
    AnswerFormat,
    AnswerParser,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from penstock.server.requests.hidden_states import beside_the_loop, hidden_states_field


class Usage:
    """Token counts of an HTTP request. `note` takes the outputs of its prompts: deltas, or final ones.

    completion_tokens: of all samples. A prompt counts once, however many samples it has.
    """

    def __init__(self) -> None:
        self.completion_tokens = 0
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}

    def note(self, index: int, output: RequestOutput) -> None:
        """Count an output. index: number of its prompt."""
        self._prompt_tokens[index] = len(output.prompt_token_ids)
        self._cached_tokens[index] = output.num_cached_tokens
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached_tokens.values())

    def data(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def end_fields(completion: CompletionOutput, request: GenerationFields) -> dict[str, Any]:
    """Fields of an output that has ended: those of `notes_at_end`, and hidden_states if the request asks for them."""
    return notes_at_end(completion) | hidden_states_field(completion, request)


def notes_at_end(completion: CompletionOutput) -> dict[str, Any]:
    """Fields of an output that has ended: what does not hold by its JSON schema, where that is checked, and the version
    of weights that are not those of the start.
    """
    notes: dict[str, Any] = {} if completion.schema_errors is None else {"schema_errors": completion.schema_errors}
    return notes | {"weight_version": completion.weight_version} if completion.weight_version else notes


class AnswerSample:
    """Sample of an answer: its parser and its events so far.

    token_ids: so far. reasons: whether it has reasoning. end_fields: see `end_fields`; none before its end.
    finish_reason: as chat completions have it, "tool_calls" if the answer calls tools; None while it goes on. It stays
    "stop" where a stop string or stop token cuts the last call's arguments, which nothing should be called with.
    """

    def __init__(self, index: int, parser: AnswerParser, request: GenerationFields) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.token_ids: list[int] = []
        self.reasons = False
        self.end_fields: dict[str, Any] = {}
        self._parser = parser
        self._request = request
        # Arguments of the last call, in pieces; None without a call.
        self._arguments: list[str] | None = None

    def push(self, completion: CompletionOutput) -> list[AnswerEvent]:
        """Events of the sample's next output, a delta or the whole one."""
        self.token_ids += completion.token_ids
        events = self._parser.push(completion.text)
        if completion.finish_reason is not None:
            events = [*events, *self._parser.finish()]
        self.reasons = self.reasons or any(isinstance(event, ReasoningDelta) for event in events)
        for event in events:
            if isinstance(event, ToolCallStart):
                self._arguments = []
            elif isinstance(event, ToolCallArguments) and self._arguments is not None:
                self._arguments.append(event.text)
        if completion.finish_reason is not None:
            self.finish_reason = completion.finish_reason
            self.end_fields = end_fields(completion, self._request)
            if completion.finish_reason == "stop" and self._arguments is not None:
                is_cut = completion.stop_reason is not None and not _is_json("".join(self._arguments))
                self.finish_reason = "stop" if is_cut else "tool_calls"
        return events


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True


class SamplePart(NamedTuple):
    """Next part of a sample. events: what the parser made of its text; completion: its tokens and log-probabilities."""

    sample: AnswerSample
    events: list[AnswerEvent]
    completion: CompletionOutput


class AnswerSamples:
    """Samples of one prompt, from its outputs: deltas, or a final one. samples: empty before the first output."""

    def __init__(self, request: GenerationFields, form: AnswerFormat, n: int) -> None:
        self.usage = Usage()
        self.samples: list[AnswerSample] = []
        self._request = request
        self._form = form
        self._n = n
        self._prompt_token_ids: list[int] = []

    async def take(self, output: RequestOutput) -> list[SamplePart]:
        """As `push`, without holding up the event loop."""
        return await beside_the_loop(self._request, self.push, output)

    def push(self, output: RequestOutput) -> list[SamplePart]:
        """Parts of the samples that go on, or end, with this output."""
        self.usage.note(0, output)
        if not self.samples:
            ids = self._prompt_token_ids = output.prompt_token_ids
            self.samples = [AnswerSample(index, self._form.parser(ids), self._request) for index in range(self._n)]
        return [
            SamplePart(sample, sample.push(completion), completion)
            for completion in output.outputs
            if (sample := self.samples[completion.index]).finish_reason is None
        ]

    @property
    def ended(self) -> AnswerSample:
        """The only sample, which has ended. Raises ApiError for one that was aborted."""
        (sample,) = self.samples
        if sample.finish_reason == "abort":
            message = "The request was aborted: its timeout passed, or the server shuts down."
            raise ApiError(503, message, code="aborted")
        return sample

    def usage_data(self) -> dict[str, Any]:
        """OpenAI's `usage` of a chat completion."""
        return {**self.usage.data(), "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens}}

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens of all samples that are reasoning, so far."""
        return sum(
            self._form.num_reasoning_tokens(self._prompt_token_ids, sample.token_ids)
            for sample in self.samples
            if sample.reasons
        )


@dataclass(slots=True)
class ToolCall:
    """A whole tool call. arguments: JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """A whole answer. content, reasoning: None if the answer has none."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[AnswerEvent]) -> Answer:
        """Answer from all its events."""
        answer = cls()
        for event in events:
            match event:
                case ContentDelta(text):
                    answer.content = (answer.content or "") + text
                case ReasoningDelta(text):
                    answer.reasoning = (answer.reasoning or "") + text
                case ToolCallStart(_, id, name):
                    answer.tool_calls.append(ToolCall(id, name))
                case ToolCallArguments(index, text):
                    answer.tool_calls[index].arguments += text
        return answer
