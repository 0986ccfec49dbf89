"""Files of examples/serving: clients against a small server, and files that other programs read."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from openai import OpenAI
from typer.main import get_command

from penstock.cli.app import app
from penstock.server.http.guards import PUBLIC_PATHS
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


def test_what_the_image_copies_is_there() -> None:
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (SERVING / "Dockerfile").read_text(), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert "src" in names
    assert [name for name in names if not (EXAMPLES.parent / name).exists()] == []


def test_the_unit_starts_the_server_and_keeps_caches_in_its_state_folder() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(SERVING / "penstock.service")
    service = unit["Service"]
    assert service["ExecStart"].startswith("/opt/penstock/bin/penstock serve --config ")
    assert service["ExecStart"].endswith(" --yes"), "nobody is there to be asked whether smollm2 may be fetched"
    variables = dict(one.split("=", 1) for one in service["Environment"].split())
    state = f"/var/lib/{service['StateDirectory']}/"
    assert set(variables) == {"PENSTOCK_CACHE", "HF_HOME"}
    assert all(value.startswith(state) for value in variables.values())


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their arguments, without comments and line breaks."""
    text = re.sub(r"^#.*\n", "", (SERVING / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    pairs = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(name, arguments) for name, arguments in pairs]


def arguments_of_serve(words: list[str]) -> dict[str, Any]:
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return dict(command.make_context("serve", words).params)


def test_the_image_serves_as_the_command_line_does() -> None:
    found = dict(instructions())
    assert json.loads(found["ENTRYPOINT"]) == ["penstock", "serve"]
    given = arguments_of_serve(json.loads(found["CMD"]))
    assert (given["model_tag"], given["host"], given["port"]) == ("demo", "0.0.0.0", int(found["EXPOSE"]))
    assert "/ready" in found["HEALTHCHECK"]
    assert "/ready" in PUBLIC_PATHS


def test_the_image_has_the_extras_of_a_server_of_gguf_files() -> None:
    (extras,) = re.findall(r'"\.\[(.+)\]"', (SERVING / "Dockerfile").read_text())
    known = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"server", "gguf"} == set(extras.split(",")) <= set(known)


def test_compose_keeps_the_caches_of_the_images_user() -> None:
    found = dict(instructions())
    compose = yaml.safe_load((SERVING / "docker-compose.yaml").read_text())
    service = compose["services"]["penstock"]
    (cache,) = [volume.split(":")[1] for volume in service["volumes"] if volume.split(":")[0] in compose["volumes"]]
    assert cache == f"{found['WORKDIR']}/.cache"
    assert any(
        name == "RUN" and f"--owner={found['USER']}" in given and cache in given for name, given in instructions()
    )
    words = [re.sub(r"\$\{\w+:[-?](.*)\}", r"\1", word) for word in service["command"]]
    assert arguments_of_serve(words)["model_tag"] == "demo"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_is_built_and_serves() -> None:
    builder = next(filter(None, map(shutil.which, ("docker", "podman"))), None)
    if builder is None or subprocess.run([builder, "info"], capture_output=True).returncode:
        pytest.skip("needs docker or podman")
    build = [builder, "build", "--file", str(SERVING / "Dockerfile"), "--tag", "penstock-test", str(EXAMPLES.parent)]
    subprocess.run(build, check=True)
    code = "import gguf, fastapi, penstock; print(len(penstock.LLM('demo').generate('a')[0].outputs[0].token_ids))"
    command = [builder, "run", "--rm", "--entrypoint", "python", "penstock-test", "-c", code]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) > 0
