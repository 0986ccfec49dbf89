"""Errors over HTTP name models and files of the server without its folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.checkpoints.shown_model import shown_model
from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.errors import EngineDead
from penstock.server.http.errors import api_error
from support.fake_engine import FakeCore, write_model
from support.servers import Served, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    engine = AsyncEngine.from_config(EngineConfig.create(str(folder)), load_core=lambda config: FakeCore())
    with serving(engine) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": [5] * 100_000}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ],
)
def test_refusals_hold_no_folder_of_the_server(path: str, body: object, server: Served, folder: Path) -> None:
    reply = server.request("POST", path, body)
    assert reply.status == 400
    text = reply.body.decode()
    assert str(folder.parent) not in text
    assert str(Path.home()) not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'/srv/models/llama/model-1.safetensors' is damaged", "'model-1.safetensors' is damaged"),
        ('File "/usr/lib/python3.12/json/decoder.py", line 3', 'File "decoder.py", line 3'),
        ("see https://example.org/a/b, or 3/4/5 of /v1/models", "see https://example.org/a/b, or 3/4/5 of models"),
    ],
)
def test_errors_of_the_engine_name_files_without_folders(text: str, shown: str) -> None:
    error = api_error(EngineDead(text), "id")
    assert error.message == f"The engine does not serve: {shown}"


def test_models_are_shown_by_name() -> None:
    assert shown_model("demo") == "demo"
    assert shown_model("org/name") == "org/name"
    assert shown_model(Path("/home/me/models/llama")) == "llama"
    assert shown_model("/home/me/.cache/huggingface/hub/models--org--name/snapshots/0a1b") == "org/name"
    assert shown_model("/home/me/.cache/penstock/gguf/llama-Q8_0-0123456789abcdef") == "llama-Q8_0.gguf"
