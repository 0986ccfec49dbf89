"""`penstock chat` in a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from penstock.cli.chat_terminal import EXAMPLES
from support.fake_engine import write_model
from support.terminal import CTRL_C, CTRL_D, TAB, UP, Terminal

FAKE_PENSTOCK = Path(__file__).parents[1] / "support" / "fake_penstock.py"
Start: TypeAlias = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    folder = write_model(tmp_path / "model", longest_context=512)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    terminals = []

    def run(*arguments: str, **environment: Any) -> Terminal:
        command = [sys.executable, str(FAKE_PENSTOCK), "chat", "--model", str(folder), *arguments]
        terminals.append(Terminal(command, {**os.environ, "FAKE_MAX_MODEL_LEN": "512", **environment}))
        return terminals[-1]

    yield run
    for terminal in terminals:
        terminal.close()


def test_a_conversation_in_a_terminal(start: Start, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    terminal = start("--max-tokens", "400", FAKE_STEP_SECONDS="0.02", FAKE_CLOSED=str(closed))
    at = terminal.wait_for("Ctrl-D leaves.")
    at = terminal.wait_for("> ", after=at)

    # An answer begins to show long before it is complete, and Ctrl-C stops it without leaving.
    terminal.type("hello there\n")
    at = terminal.wait_for("hello there\n", after=at)
    while len(terminal.screen) < at + 10:
        terminal._read(0.2)
    terminal.type(CTRL_C)
    at = terminal.wait_for("(stopped)\n> ", after=at)
    assert terminal.process.poll() is None

    # A part of an answer is remembered.
    terminal.type("/history\n")
    at = terminal.wait_for("user: hello there\nassistant: ", after=at)
    at = terminal.wait_for("\n> ", after=at)

    # Lines can be edited, taken from the history, and completed.
    terminal.type("/undp\x7fo\n")
    at = terminal.wait_for("(taken back: hello there)\n> ", after=at)
    terminal.type(UP + UP + "\n")
    # The line is edited on the screen, so that only what differs from the one before is written.
    at = terminal.wait_for("history\n> ", after=at)
    terminal.type("/res" + TAB + "\n")
    at = terminal.wait_for("(forgotten)\n> ", after=at)

    # Ctrl-C at the prompt clears the line; Ctrl-D leaves.
    terminal.type("never mind")
    at = terminal.wait_for("never mind", after=at)
    at = terminal.press_until(CTRL_C, "\n> ", after=at)
    terminal.type("/history\n")
    at = terminal.wait_for("/history\n> ", after=at)
    terminal.type(CTRL_D)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.screen
    assert "Try:" not in terminal.screen
    assert closed.read_text() == "0 running"


def test_ctrl_c_while_the_model_loads_leaves(start: Start) -> None:
    terminal = start(FAKE_START="interrupted import")
    terminal.wait_for("starting")
    terminal.type(CTRL_C)
    assert terminal.end() == 130
    assert "Traceback" not in terminal.screen


@pytest.mark.slow
def test_the_demo_model_talks() -> None:
    command = [sys.executable, "-m", "penstock.cli", "chat", "--device", "cpu", "--option", "num_threads=1"]
    terminal = Terminal([*command, "--temperature", "0", "--max-tokens", "60"], dict(os.environ))
    try:
        greeted = terminal.wait_for("Ctrl-D leaves.")
        for example in EXAMPLES["demo"]:
            greeted = terminal.wait_for(example, after=greeted)
        at = terminal.wait_for("> ", after=greeted)
        terminal.type("Which is larger, 47 or 38?\n")
        at = terminal.wait_for("\n", after=terminal.wait_for("38?", after=at))
        at = terminal.wait_for("\n> ", after=at)
        answer = terminal.screen[: at - 3].rsplit("38?\n", 1)[1]
        assert answer.strip()
        terminal.type("/history\n")
        terminal.wait_for(f"assistant: {answer.strip()}", after=at)
        terminal.type("/quit\n")
        assert terminal.end() == 0
    finally:
        terminal.close()


@pytest.mark.slow
def test_the_greetings_examples_are_answered_rightly() -> None:
    from penstock import LLM, SamplingParams

    conversations = [[{"role": "user", "content": example}] for example in EXAMPLES["demo"]]
    with LLM("demo", device="cpu", num_threads=1, kv_cache_memory_bytes=32 * 1024**2) as llm:
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=40))
    total, reversed_list, name = (output.outputs[0].text for output in outputs)
    assert "85" in total
    assert "stone, river, apple" in reversed_list
    assert "Penstock" in name
