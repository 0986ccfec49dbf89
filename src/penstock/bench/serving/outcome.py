"""Outcome of one request of a server benchmark, and its reader."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec


class Status(enum.Enum):
    """State of a request at its end. REJECTED: by 429. DISCONNECTED: the client left on purpose."""

    COMPLETED = "completed"
    FAILED = "failed"
    REJECTED = "rejected"
    DISCONNECTED = "disconnected"


@dataclass(slots=True)
class Outcome:
    """Times and tokens of one request. Times are of the client's clock, in seconds.

    prompt_len: tokens, as the server reports them, else as the dataset knows them; None if neither does.
    output_len: tokens, as the server reports them, else the number of chunks with text (`is_counted` is False then).
    start, end: from before the connection to the end of the response. first_token: None without streaming.
    chunk_times: of the chunks with text. cause, error: of a failure, by kind and in full.
    """

    start: float
    prompt_len: int | None = None
    output_len: int = 0
    is_counted: bool = False
    end: float = 0.0
    first_token: float | None = None
    chunk_times: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    status: Status = Status.FAILED
    http_status: int | None = None
    cause: str = ""
    error: str = ""
    retry_after_s: float | None = None

    @property
    def latency_s(self) -> float:
        """End-to-end latency."""
        return self.end - self.start

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None without streaming."""
        return None if self.first_token is None else self.first_token - self.start

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first one; None if there is no such token."""
        if self.first_token is None or self.output_len < 2:
            return None
        return (self.end - self.first_token) / (self.output_len - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: times between chunks with text."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunk_times)]

    def fail(self, cause: str, error: str) -> None:
        """Make it a failure. cause: short, the same for all failures of this kind."""
        self.status, self.cause, self.error = Status.FAILED, cause, error


class RequestFailed(Exception):
    """A response that is a failure. cause: short, the same for all failures of this kind."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class ClientLeaves(Exception):
    """The client disconnects in the middle of a response, as it was asked to."""


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Text | None = None
    message: _Text | None = None
    finish_reason: str | None = None

    def new_text(self) -> str | None:
        """Text of this chunk; None if no token is in it, as at the begin and the end of a chat answer."""
        if self.text is not None:
            # A token that ends within a character has no text yet.
            return self.text if self.text or self.finish_reason is None else None
        part = self.delta or self.message
        if part is None:
            return None
        text = (part.reasoning or part.reasoning_content or "") + (part.content or "")
        return text if text or part.tool_calls else None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Answer)


class AnswerReader:
    """Reader of a completion or a chat completion, streamed or whole, that fills in an `Outcome`.

    leave_after: chunks with text after which the client disconnects; None reads to the end.
    """

    def __init__(self, outcome: Outcome, leave_after: int | None = None) -> None:
        self._outcome = outcome
        self._leave_after = leave_after
        self._is_stream = False
        self._rest = b""
        self._pieces: list[bytes] = []
        self._texts: list[str] = []
        self._is_done = False

    def begin(self, status: int, headers: Mapping[str, str], now: float) -> None:
        outcome = self._outcome
        outcome.http_status = status
        self._is_stream = status == 200 and headers.get("content-type", "").startswith("text/event-stream")
        if status == 429:
            outcome.retry_after_s = _seconds(headers.get("retry-after"))

    def feed(self, data: bytes, now: float) -> None:
        if not self._is_stream:
            self._pieces.append(data)
            return
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take_event(line[5:].strip(), now)

    def end(self, now: float) -> None:
        outcome = self._outcome
        outcome.end = now
        if not self._is_stream:
            self._take_whole(b"".join(self._pieces), now)
        elif not self._is_done and outcome.finish_reason is None:
            raise RequestFailed("stream ended early", "the stream ended without a finish_reason or [DONE]")
        outcome.text = "".join(self._texts)
        if not outcome.is_counted:
            outcome.output_len = len(outcome.chunk_times)
        outcome.status = Status.COMPLETED

    def _take_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        if self._take_answer(self._decode("malformed chunk", data)):
            outcome = self._outcome
            outcome.chunk_times.append(now)
            if outcome.first_token is None:
                outcome.first_token = now
            if self._leave_after is not None and len(outcome.chunk_times) >= self._leave_after:
                raise ClientLeaves

    def _take_whole(self, body: bytes, now: float) -> None:
        status = self._outcome.http_status
        if status != 200:
            raise RequestFailed(f"HTTP {status}", _message(body))
        self._take_answer(self._decode("malformed response", body))
        if self._outcome.finish_reason is None:
            raise RequestFailed("malformed response", f"the response has no finish_reason: {_shown(body)}")

    def _take_answer(self, answer: _Answer) -> bool:
        """Take a chunk, or a whole answer; whether it has a token."""
        if answer.error is not None:
            raise RequestFailed("error in the stream", _said(answer.error))
        if answer.usage is not None:
            self._take_usage(answer.usage)
        has_token = False
        for choice in answer.choices:
            if choice.finish_reason is not None:
                self._outcome.finish_reason = choice.finish_reason
            if (text := choice.new_text()) is not None:
                self._texts.append(text)
                has_token = True
        return has_token

    def _take_usage(self, usage: _Usage) -> None:
        if usage.prompt_tokens is not None:
            self._outcome.prompt_len = usage.prompt_tokens
        if usage.completion_tokens is not None:
            self._outcome.output_len = usage.completion_tokens
            self._outcome.is_counted = True

    @staticmethod
    def _decode(cause: str, data: bytes) -> _Answer:
        try:
            return _DECODER.decode(data)
        except msgspec.MsgspecError as error:
            raise RequestFailed(cause, f"{error}: {_shown(data)}") from error


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header; None without one, or for a date."""
    try:
        return None if retry_after is None else float(retry_after)
    except ValueError:
        return None


def _message(body: bytes) -> str:
    """Text of an error response: of OpenAI's error object, if it is one."""
    try:
        error = _DECODER.decode(body).error
    except msgspec.MsgspecError:
        error = None
    return _shown(body) if error is None else _said(error)


def _said(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)


def _shown(data: bytes) -> str:
    return data[:200].decode(errors="replace")
