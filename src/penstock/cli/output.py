"""What a command writes: text as it comes, or one JSON object per finished request."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import msgspec

from penstock.cli.failures import OutputClosed
from penstock.cli.output_file import output_file
from penstock.engine.output_processor import Progress
from penstock.engine.outputs import CompletionOutput, RequestOutput


@contextmanager
def open_output(path: Path | None, *, as_json: bool) -> Iterator[TextIO]:
    """The `output_file` for `path`, or standard output. Raises ConfigError when the file cannot be opened.

    JSON is always UTF-8; text has question marks for what the terminal's encoding cannot show.
    """
    if path is None:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8" if as_json else None, errors="replace")
        yield sys.stdout
        return
    with output_file(path) as file:
        yield file


def write(out: TextIO, text: str) -> None:
    """Write at once. Raises OutputClosed when nobody reads it any more."""
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError as error:
        raise OutputClosed from error


def stream_text(steps: Iterable[Progress], out: TextIO) -> RequestOutput:
    """Write one request's text as it comes, and end its last line. Returns what it came to."""
    ends_line = False
    try:
        for progress in steps:
            text = progress.take_output().outputs[0].text
            if text:
                write(out, text)
                ends_line = text.endswith("\n")
    except KeyboardInterrupt:
        write(out, "\n")
        raise
    if not ends_line:
        write(out, "\n")
    return progress.output()


class ResultWriter:
    """Writes results in the order of the requests, each as soon as all before it are written.

    ids: the requests' own names, in order.
    """

    def __init__(self, out: TextIO, ids: list[Any]) -> None:
        self.num_failed = 0
        self._out = out
        self._ids = ids
        self._waiting: dict[int, RequestOutput] = {}
        self._next = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Take the finished request number `index`, from 0."""
        self._waiting[index] = output
        self.num_failed += output.error is not None
        while self._next in self._waiting:
            result = self._waiting.pop(self._next)
            for completion in result.outputs:
                line = _result_line(self._next, self._ids[self._next], result, completion)
                write(self._out, msgspec.json.encode(line).decode() + "\n")
            self._next += 1


def _result_line(index: int, id: Any, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    """A line of JSONL output, in the order of the requests; one for each of a request's outputs.

    index: number of the request, from 0. sample: number among its outputs, from 0.
    id: the one that its input line gave, if any.
    prompt: its text, or its token ids if it was given as such.
    logprobs, prompt_logprobs: per token, by token id (as text, JSON having no other keys); -inf is written as null.
    error: why it failed, when finish_reason is "error".
    """
    return {
        "index": index,
        "sample": completion.index,
        "id": id,
        "prompt": output.prompt_token_ids if output.prompt is None else output.prompt,
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
