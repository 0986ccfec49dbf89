"""Standard output of commands, and streamed text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from penstock.cli.failures import OutputClosed
from penstock.errors import ConfigError
from penstock.observability.printable import without_controls

if TYPE_CHECKING:
    from penstock.engine.output.outputs import RequestOutput
    from penstock.engine.output.progress import Progress


def standard_output(*, as_json: bool) -> TextIO:
    """Return standard output: UTF-8 for JSON; for text, question marks replace what the terminal cannot show.

    Raises ConfigError where the process was started without standard output.
    """
    if sys.stdout is None:
        raise ConfigError("Standard output is closed, so the results would be lost. Redirect it (> FILE) instead.")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8" if as_json else None, errors="replace")
    return sys.stdout


def write(out: TextIO, text: str) -> None:
    """Write and flush. Raises OutputClosed if the reader has closed the pipe."""
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError as error:
        raise OutputClosed from error


def show(*parts: Any) -> None:
    """Print what rich renders. A function makes its part for the width of the terminal."""
    from rich.console import Console

    out = standard_output(as_json=False)
    console = Console(file=out, highlight=False)
    # `write` prints the text, since rich exits in its own way when the pipe is closed.
    with console.capture() as capture:
        for part in parts:
            console.print(part(console.width) if callable(part) else part)
    write(out, capture.get())


def stream_text(steps: Iterable[Progress], out: TextIO) -> RequestOutput:
    """Stream one request's text, and end its last line. Returns the final output.

    A terminal gets no control characters of the text, which are commands there; a file or pipe gets all of it.
    """
    ends_line = False
    shown: Callable[[str], str] = without_controls if out.isatty() else str
    try:
        for progress in steps:
            text = progress.take_output().outputs[0].text
            if text:
                write(out, shown(text))
                ends_line = text.endswith("\n")
    except (KeyboardInterrupt, SystemExit):
        write(out, "\n")
        raise
    if not ends_line:
        write(out, "\n")
    return progress.output()
