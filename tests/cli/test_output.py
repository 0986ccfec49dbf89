"""Text of a model on standard output."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.output import stream_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "shown"), [(Terminal(), "a\tb\n]52;c;bHM=c\n"), (io.StringIO(), "a\tb\n\x1b]52;c;bHM=\x07\x9bc\n")]
)
def test_a_terminal_gets_no_control_characters_of_a_text(out: io.StringIO, shown: str) -> None:
    pieces = ["a\tb\n", "\x1b", "]52;c;bHM=\x07\x9bc"]
    steps: list[Any] = [
        SimpleNamespace(take_output=lambda text=text: SimpleNamespace(outputs=[SimpleNamespace(text=text)]))
        for text in pieces
    ]
    steps[-1].output = lambda: None
    stream_text(steps, out)
    assert out.getvalue() == shown
