"""`penstock run-batch`: the answers of `/v1/chat/completions` and `/v1/completions` to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

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
    assert third["error"]["message"].endswith("prompt is missing.")


@pytest.mark.parametrize("flag", ["-i", "-o"])
def test_urls_are_refused(flag: str, tmp_path: Path) -> None:
    paths = {"-i": str(tmp_path / "in.jsonl"), "-o": str(tmp_path / "out.jsonl"), flag: "https://example.com/x.jsonl"}
    result = run(*(word for pair in paths.items() for word in pair))
    assert result.exit_code != 0
    assert "is a URL. Allowed: a file of this machine." in result.output
