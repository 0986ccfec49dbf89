"""Results of requests as JSON lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol, TextIO

import msgspec

from penstock.cli.output import standard_output, write
from penstock.cli.output_file import PartialFile, output_file, partial_files
from penstock.contract import SamplingParams
from penstock.engine.output.outputs import CompletionOutput, RequestMetrics, RequestOutput
from penstock.errors import InvalidRequest
from penstock.text.tokenizer import Tokenizer


class ResultFormat(Protocol):
    """Format of one request's results."""

    def task(self, prompt: Any, params: SamplingParams, tokenizer: Tokenizer) -> tuple[Any, SamplingParams]:
        """Prompt and parameters for the engine, which make results of this format. Raises InvalidRequest."""
        ...

    def lines(
        self, index: int, output: RequestOutput, *, request_hash: str | None, tokenizer: Tokenizer | None
    ) -> list[dict[str, Any]]:
        """Return the lines of a request. index: of the request. tokenizer: None for one that was refused."""
        ...

    def num_lines(self, num_outputs: int) -> int:
        """Number of lines of a request with `num_outputs` outputs."""
        ...

    def identity(self, index: int) -> Any:
        """Name of the request in its file, and fields that its answer repeats."""
        ...


class ResultSink(Protocol):
    """Sink of results, each with the number of its request."""

    def put(self, index: int, text: str) -> None: ...

    def put_rest(self) -> None:
        """Write the results that wait for others, which will not come."""
        ...


class OrderedResults:
    """Sink that writes in the order of the requests, each result once all before it are written."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._waiting: dict[int, str] = {}
        self._next = 0

    def put(self, index: int, text: str) -> None:
        self._waiting[index] = text
        while self._next in self._waiting:
            write(self._out, self._waiting.pop(self._next))
            self._next += 1

    def put_rest(self) -> None:
        for index in sorted(self._waiting):
            write(self._out, self._waiting.pop(index))


@dataclass(frozen=True)
class OwnFormat:
    """Penstock's format: a line per output. id: of the input line, if any."""

    id: Any = None

    def task(self, prompt: Any, params: SamplingParams, tokenizer: Tokenizer) -> tuple[Any, SamplingParams]:
        return prompt, params

    def lines(
        self, index: int, output: RequestOutput, *, request_hash: str | None, tokenizer: Tokenizer | None
    ) -> list[dict[str, Any]]:
        return [_result_line(index, self.id, request_hash, output, completion) for completion in output.outputs]

    def num_lines(self, num_outputs: int) -> int:
        return num_outputs

    def identity(self, index: int) -> Any:
        return [index, self.id]


@contextmanager
def open_results(path: Path | None, *, resumes: bool) -> Iterator[ResultSink]:
    """Open the sink of results for `path`, or for standard output if it is None.

    Raises ConfigError if the file cannot be opened, or cannot be resumed.
    """
    if path is None:
        yield OrderedResults(standard_output(as_json=True))
        return
    if not resumes and (left := partial_files(path)):
        print(f"penstock: {left[0].name} of an earlier run stays; --resume would go on from it.", file=sys.stderr)
    with output_file(path, only_partial=resumes) as file:
        yield file if isinstance(file, PartialFile) else OrderedResults(TextIOWrapper(file, encoding="utf-8"))


class ResultWriter:
    """Writer of results as JSON lines.

    formats, hashes: of the requests, in order.
    """

    def __init__(self, out: ResultSink, formats: Sequence[ResultFormat], hashes: Sequence[str | None]) -> None:
        self.num_failed = 0
        self._out = out
        self._formats = formats
        self._hashes = hashes

    def add(self, index: int, output: RequestOutput, tokenizer: Tokenizer) -> None:
        """Write the output of a finished request."""
        self._add(index, output, tokenizer)

    def add_refusal(self, index: int, error: InvalidRequest) -> None:
        """Write the error of a request that never runs."""
        self._add(index, _refused_output(error), None)

    def write_rest(self) -> None:
        """Write the results that wait for others, which will not come."""
        self._out.put_rest()

    def _add(self, index: int, output: RequestOutput, tokenizer: Tokenizer | None) -> None:
        self.num_failed += output.error is not None
        request_hash = self._hashes[index]
        lines = self._formats[index].lines(index, output, request_hash=request_hash, tokenizer=tokenizer)
        self._out.put(index, "".join(msgspec.json.encode(line).decode() + "\n" for line in lines))


def _refused_output(error: InvalidRequest) -> RequestOutput:
    """Output of a request that never ran."""
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


def _result_line(
    index: int, id: Any, request_hash: str | None, output: RequestOutput, completion: CompletionOutput
) -> dict[str, Any]:
    """JSON line of one output of a request.

    index: of the request. sample: index among its outputs.
    id: of the input line, if any.
    request_hash: of `resume.request_hashes`, which a later run finds the answer by; null for a line that was refused.
    prompt: its text, or its token ids if it was given as such; null for a line that was refused.
    logprobs, prompt_logprobs: per token, by token id (as text, JSON having no other keys); -inf is written as null.
    hidden_states: lists of numbers by layer, of a request for them.
    error: why it failed, when finish_reason is "error".
    schema_errors: what does not hold of it by its JSON schema, where that is checked at the end.
    """
    states = completion.hidden_states
    of_layers = {} if states is None else {"hidden_states": states.by_layer()}
    return {
        "index": index,
        "sample": completion.index,
        "id": id,
        "request_hash": request_hash,
        "prompt": output.prompt if output.prompt is not None else output.prompt_token_ids or None,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        **({} if completion.schema_errors is None else {"schema_errors": completion.schema_errors}),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "cumulative_logprob": completion.cumulative_logprob,
        "logprobs": completion.logprobs,
        "prompt_logprobs": output.prompt_logprobs,
        **of_layers,
        "error": output.error,
    }
