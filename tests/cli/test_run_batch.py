"""`penstock run-batch`: the answers of `/v1/chat/completions` and `/v1/completions` to a file."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from penstock.cli import url_files
from penstock.cli.app import app

COMMAND_LINE = CliRunner(env={"COLUMNS": "100"})
CHAT = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}


def run(*arguments: str) -> Any:
    return COMMAND_LINE.invoke(app, ["run-batch", *arguments])


def line(name: str, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"model": "demo", **body}})


def test_answers_are_those_of_a_server_with_its_limits(tmp_path: Path) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line("a", "/v1/chat/completions", **CHAT), line("b", "/v1/completions", prompt="Once", temperature=0)]
    given.write_text("\n".join([*lines, line("c", "/v1/completions")]))
    result = run("-i", str(given), "-o", str(out), "--num-threads", "1", "--option", "kv_cache_memory_bytes=33554432")
    assert result.exit_code == 1, result.output  # The third line is wrong.
    first, second, third = (json.loads(text) for text in out.read_text().splitlines())
    choice = first["response"]["body"]["choices"][0]
    # A chat has no limit but the context, a completion 16 tokens.
    assert (first["custom_id"], choice["finish_reason"]) == ("a", "stop")
    assert first["response"]["body"]["usage"]["completion_tokens"] > 16
    assert second["response"]["body"]["usage"]["completion_tokens"] == 16
    assert "line 3: prompt is missing" in third["error"]["message"]


def test_calls_and_reasoning_are_read_as_by_a_server(tmp_path: Path) -> None:
    fixed = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    asked: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "f", "parameters": fixed}}]}
    asked |= {"messages": CHAT["messages"], "max_tokens": 60, "parallel_tool_calls": False}
    # All that the model may write, so that it decides so.
    calls = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    choices: dict[str, dict[str, Any]] = {
        "named": {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "required": {"tool_choice": "required"},
        "auto": {"structured_outputs": {"choice": [calls]}},
        "reasoned": {"tools": None, "structured_outputs": {"choice": ["<think>Why</think>yes"]}},
    }
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(name, "/v1/chat/completions", **{**asked, **more}) for name, more in choices.items()]
    given.write_text("\n".join(lines))
    parsers = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--option", "reasoning_parser=qwen3")
    flags = ("--option", "enable_in_reasoning=true", "--option", "kv_cache_memory_bytes=33554432", "--num-threads", "1")
    result = run("-i", str(given), "-o", str(out), *parsers, *flags)
    assert result.exit_code == 0, result.output
    answers = {one["custom_id"]: one["response"]["body"]["choices"][0] for one in map(json.loads, out.open())}
    reasoned = answers.pop("reasoned")["message"]
    assert (reasoned["reasoning"], reasoned["content"]) == ("Why", "yes")
    for choice in answers.values():
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "f")
        assert json.loads(call["function"]["arguments"]) == {"a": 1}


class Files(BaseHTTPRequestHandler):
    """Handler that serves and stores files by their paths, of which /full cannot be written."""

    content: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        data = self.content.get(self.path)
        self.send_response(404 if data is None else 200)
        self.end_headers()
        self.wfile.write(data or b"")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.path.startswith("/full"):
            self.content[self.path] = data
        self.send_response(507 if self.path.startswith("/full") else 200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def files() -> Iterator[str]:
    """URL of a server of files."""
    Files.content.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are answered with their names, without an engine."""

    def answer(work: list[Any], model: str, engine: Any, output: Path, *_: Any, **__: Any) -> None:
        output.write_text("".join(f"{one.format.custom_id}\n" for one in work))
        sys.exit(1)

    monkeypatch.setattr("penstock.cli.generate.run_requests", answer)


@pytest.mark.usefixtures("answered")
def test_urls_are_read_and_written(files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Files.content["/in?signature=1"] = line("a", "/v1/completions", prompt="Once").encode()
    result = run("-i", f"{files}/in?signature=1", "-o", f"{files}/out")
    assert result.exit_code == 1, result.output
    assert Files.content["/out"] == b"a\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("answered")
def test_answers_that_cannot_be_sent_are_kept(files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Files.content["/in"] = line("a", "/v1/completions", prompt="Once").encode()
    result = run("-i", f"{files}/in", "-o", f"{files}/full?signature=secret")
    (kept,) = tmp_path.glob("*/output.jsonl")
    assert kept.read_text() == "a\n"
    assert result.exit_code == 2
    message = " ".join(result.output.split())
    assert "/full cannot be written: HTTP Error 507" in message
    assert f"Send them with: curl -T {kept}" in message
    assert "secret" not in message


def test_wrong_urls_are_named(files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_files, "_MOST_BYTES", 3)
    Files.content["/large"] = b"four"
    out = str(tmp_path / "out.jsonl")
    for name, why in (("none", "HTTP Error 404"), ("large", "it has more than 3 bytes")):
        result = run("-i", f"{files}/{name}", "-o", out)
        assert result.exit_code == 2
        message = f"--input-file {files}/{name} cannot be read: {why}"
        assert message in " ".join(result.output.split())
    result = run("-i", out, "-o", f"{files}/out", "--resume")
    assert "--resume is for an --output-file on this machine" in " ".join(result.output.split())
