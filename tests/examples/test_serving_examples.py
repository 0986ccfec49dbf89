"""Files of examples/serving: clients against a small server, and files that other programs read."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from openai import OpenAI

from support.completion_server import CompletionServer, serving_in_a_thread

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVING = EXAMPLES / "serving"


@pytest.fixture
def server() -> Iterator[CompletionServer]:
    with serving_in_a_thread() as server:
        yield server


def load_client() -> ModuleType:
    spec = importlib.util.spec_from_file_location("client", SERVING / "client.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_client_streams_and_completes(server: CompletionServer, capsys: pytest.CaptureFixture[str]) -> None:
    client = load_client()
    with OpenAI(base_url=f"{server.url}/v1", api_key="secret") as openai:
        model = next(iter(openai.models.list())).id
        assert client.stream_chat(openai, model, "Hello") == "x" * 64
        assert client.complete_token_ids(openai, model, [5, 6, 7]) == ("x" * 16, 16)
    assert capsys.readouterr().out == "x" * 64 + "\n"
    chat, completion = server.requests[-2:]
    assert chat.headers["authorization"] == "Bearer secret"
    assert (chat.body["model"], completion.body["prompt"], completion.body["top_k"]) == ("served", [5, 6, 7], 20)


def test_the_client_explains_itself() -> None:
    result = subprocess.run(
        [sys.executable, SERVING / "client.py", "--help"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "--base-url" in result.stdout


def test_curl_asks_for_the_servers_model(server: CompletionServer) -> None:
    environment = {**os.environ, "OPENAI_API_KEY": "secret"}
    command = ["sh", str(SERVING / "curl.sh"), server.url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    posts = [request for request in server.requests if request.method == "POST"]
    assert result.returncode == 0, result.stderr
    assert [request.path for request in posts] == ["/v1/completions", *["/v1/chat/completions"] * 2]
    assert {request.body["model"] for request in posts} == {"served"}
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer secret"}
    assert "data: [DONE]" in result.stdout


def test_every_file_is_in_the_table() -> None:
    linked = set(re.findall(r"\]\(serving/([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    assert linked == {path.name for path in SERVING.iterdir() if path.is_file()}


def test_yaml_files_are_as_their_readers_need_them() -> None:
    options = yaml.safe_load((SERVING / "config.yaml").read_text())
    assert options["model"] == "demo"
    assert all(not name.startswith("-") for name in options)
    service = yaml.safe_load((SERVING / "docker-compose.yaml").read_text())["services"]["penstock"]
    assert (SERVING / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == SERVING / "Dockerfile"
