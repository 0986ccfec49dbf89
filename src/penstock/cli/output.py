"""Where a command writes, and text as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from penstock.cli.failures import OutputClosed
from penstock.cli.output_file import output_file
from penstock.engine.output_processor import Progress
from penstock.engine.outputs import RequestOutput


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
