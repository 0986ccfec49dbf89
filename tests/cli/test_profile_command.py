"""`penstock profile`: a trace in the named file; `penstock profile serve`: one of a running server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.engine.async_engine import AsyncEngine
from support.servers import Served, serving

COMMAND_LINE = CliRunner()
DEMO = {"num_threads": 1, "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 16}


def invoke(*arguments: str, exit_code: int = 0) -> str:
    result = COMMAND_LINE.invoke(app, ["profile", *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def names(path: Path) -> set[str]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return {event["name"] for event in json.loads(text)["traceEvents"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    options = ["--input-len", "8", "--output-len", "3", "--num-prompts", "2", "--max-model-len", "64"]
    output = invoke("--output", str(path), "--threads", "1", "--kv-cache-memory-bytes", "4MiB", *options)
    assert f"Written: {path}. Open it at https://ui.perfetto.dev." in output.replace("\n", " ")
    assert {"execute_context_2(16)_generation_0(0)", "execute_context_0(0)_generation_2(2)", "wait"} <= names(path)


def test_what_cannot_be_done_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    missing = str(tmp_path / "none" / "trace.json")
    assert "--output" in invoke("--output", missing, exit_code=2)
    where = ("--output", str(tmp_path / "trace.json"))
    assert "is not an option of penstock profile" in invoke(*where, "--profiler", "torch", exit_code=2)


def test_a_profile_that_fails_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    output = invoke("--output", str(path), "--threads", "1", "--kv-cache-memory-bytes", "1kB", exit_code=1)
    assert "OutOfMemory" in output
    assert not path.exists()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    traces: dict[str, Any] = {"profiler": "steps", "profiler_dir": tmp_path / "traces"}
    engine = AsyncEngine("demo", enable_multiprocessing=False, **traces, **DEMO)
    with serving(engine, enable_admin=True, admin_api_key="boss") as served:
        yield served


def test_a_server_writes_a_trace_for_its_admin_alone(server: Served, tmp_path: Path) -> None:
    url, key = ("--url", server.url), ("--admin-api-key", "boss")
    assert "needs its admin key" in invoke("serve", *url, "--seconds", "0.1", exit_code=2)
    refusal = invoke("serve", *url, "--admin-api-key", "user", "--seconds", "0.1", exit_code=2)
    assert "does not accept the admin key" in refusal
    output = invoke("serve", *url, *key, "--seconds", "0.1", "--prefix", "mine")
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name.startswith("mine_steps.")
    assert str(path) in output.replace("\n", "")
    assert "engine core" not in names(path)  # no step has run
    refused = server.post("/stop_profile", b"", Authorization="Bearer boss")
    assert refused.status == 400
    assert "No profile is running" in refused.error["message"]
