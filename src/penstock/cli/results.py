"""What requests came to, as lines of JSON in the order of the requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import msgspec

from penstock.cli.output import write
from penstock.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from penstock.errors import InvalidRequest


class ResultFormat(Protocol):
    """How one request is answered."""

    def lines(self, index: int, output: RequestOutput, *, was_refused: bool) -> list[dict[str, Any]]:
        """index: number of the request, from 0. was_refused: it never ran, and the output says why."""
        ...


@dataclass(frozen=True)
class OwnFormat:
    """A line for each of a request's outputs. id: the one that its input line gave, if any."""

    id: Any = None

    def lines(self, index: int, output: RequestOutput, *, was_refused: bool) -> list[dict[str, Any]]:
        return [_result_line(index, self.id, output, completion) for completion in output.outputs]


class ResultWriter:
    """Writes results in the order of the requests, each as soon as all before it are written.

    formats: of the requests, in order.
    """

    def __init__(self, out: TextIO, formats: Sequence[ResultFormat]) -> None:
        self.num_failed = 0
        self._out = out
        self._formats = formats
        self._waiting: dict[int, list[dict[str, Any]]] = {}
        self._next = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Take the finished request number `index`, from 0."""
        self._add(index, output, was_refused=False)

    def add_refusal(self, index: int, error: InvalidRequest) -> None:
        """Take the request number `index`, which never runs."""
        self._add(index, _refused_output(error), was_refused=True)

    def write_rest(self) -> None:
        """Write what waits for others, since those will not come any more."""
        for index in sorted(self._waiting):
            self._write(self._waiting.pop(index))

    def _add(self, index: int, output: RequestOutput, *, was_refused: bool) -> None:
        self._waiting[index] = self._formats[index].lines(index, output, was_refused=was_refused)
        self.num_failed += output.error is not None
        while self._next in self._waiting:
            self._write(self._waiting.pop(self._next))
            self._next += 1

    def _write(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            write(self._out, msgspec.json.encode(line).decode() + "\n")


def _refused_output(error: InvalidRequest) -> RequestOutput:
    """What comes of a request that never ran."""
    return RequestOutput(
        request_id="",
        prompt=None,
        prompt_token_ids=[],
        outputs=[CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")],
        finished=True,
        num_cached_tokens=0,
        metrics=RequestMetrics(arrival_time=time.monotonic()),
        error=str(error),
    )


def _result_line(index: int, id: Any, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    """A line of JSONL output, in the order of the requests; one for each of a request's outputs.

    index: number of the request, from 0. sample: number among its outputs, from 0.
    id: the one that its input line gave, if any.
    prompt: its text, or its token ids if it was given as such; null for a line that was refused.
    logprobs, prompt_logprobs: per token, by token id (as text, JSON having no other keys); -inf is written as null.
    error: why it failed, when finish_reason is "error".
    """
    return {
        "index": index,
        "sample": completion.index,
        "id": id,
        "prompt": output.prompt if output.prompt is not None else output.prompt_token_ids or None,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "cumulative_logprob": completion.cumulative_logprob,
        "logprobs": completion.logprobs,
        "prompt_logprobs": output.prompt_logprobs,
        "error": output.error,
    }
