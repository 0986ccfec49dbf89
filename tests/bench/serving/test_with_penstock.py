"""The load generator, the soak test's requests and the example client with Penstock's own server."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.soak_requests import KINDS, Maker, name_of

from penstock.bench.serving.http import HttpClient
from penstock.bench.serving.load import PreparedRequest, send
from penstock.bench.serving.outcome import Outcome
from penstock.bench.serving.run import ServeResult, ServeSettings
from penstock.bench.serving.run import run as run_benchmark
from penstock.bench.serving.settings import DatasetSettings, LoadSettings
from penstock.engine.async_engine import AsyncEngine
from penstock.errors import ConfigError
from support.servers import Served, serving

CLIENT = Path(__file__).parents[3] / "examples" / "serving" / "client.py"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    engine = AsyncEngine("demo", enable_multiprocessing=False, num_threads=1, kv_cache_memory_bytes=32 << 20)
    with serving(engine, api_keys=("secret",)) as served:
        yield served


class Bar:
    def update(self) -> None:
        pass


def measure(server: Served, **options: Any) -> ServeResult:
    settings = ServeSettings(
        base_url=server.url,
        dataset=DatasetSettings(num_prompts=12, random_input_len=24, random_output_len=10, random_range_ratio=0.5),
        load=LoadSettings(max_concurrency=6),
        **{"headers": {"Authorization": "Bearer secret"}, **options},
    )
    return asyncio.run(run_benchmark(settings, lambda total: Bar()))


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_streams_and_whole_responses_are_measured_alike(server: Served, backend: str) -> None:
    streamed = measure(server, backend=backend, extra_body={"ignore_eos": True})
    whole = measure(server, backend=backend, extra_body={"ignore_eos": True, "stream": False})
    for result in (streamed, whole):
        assert (result.figures["completed"], result.figures["num_without_usage"]) == (12, 0)
        assert result.model.id == "demo"
    assert [outcome.text for outcome in streamed.outcomes] == [outcome.text for outcome in whole.outcomes]
    lengths = [[(one.prompt_len, one.output_len) for one in result.outcomes] for result in (streamed, whole)]
    assert lengths[0] == lengths[1]
    assert all(5 <= output_len <= 15 for _, output_len in lengths[0])
    if backend == "openai":
        assert all(12 <= prompt_len <= 36 for prompt_len, _ in lengths[0] if prompt_len is not None)
    assert streamed.figures["median_ttft_ms"] > 0
    assert whole.figures["median_ttft_ms"] is None


@pytest.mark.slow
def test_the_server_traces_the_measured_requests(tmp_path: Path) -> None:
    options: dict[str, Any] = {"profiler": "steps", "profiler_dir": str(tmp_path), "kv_cache_memory_bytes": 8 << 20}
    engine = AsyncEngine("demo", enable_multiprocessing=False, num_threads=1, **options)
    with serving(engine, api_keys=("secret",), enable_admin=True, admin_api_key="admin") as server:
        with pytest.raises(ConfigError, match=r"/start_profile of the server answers with HTTP 401"):
            measure(server, profile=True)
        assert not list(tmp_path.iterdir())
        keys = {"Authorization": "Bearer secret", "x-api-key": "admin"}
        result = measure(server, profile=True, headers=keys, ready_check_timeout_s=60)
        assert result.figures["completed"] == 12
        assert list(tmp_path.iterdir())


def test_refused_requests_are_failures_with_the_servers_message(server: Served) -> None:
    result = measure(server, model="demo", extra_body={"model": "no such model"})
    assert list(result.figures["failures"]) == ["HTTP 404"]
    assert "no such model" in result.figures["failures"]["HTTP 404"]["first"]


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_the_server_ends_requests_of_the_soak_test_as_it_should(server: Served, kind: Maker) -> None:
    async def send_all() -> list[tuple[Any, Outcome]]:
        client = HttpClient(server.url, {"Authorization": "Bearer secret"}, time.perf_counter)
        ended = []
        for seed in range(8):
            request = kind(random.Random(seed), "demo")
            body = request.body if isinstance(request.body, str) else json.dumps(request.body)
            prepared = PreparedRequest(client.message("POST", request.path, body.encode()), None, request.leave_after)
            ended.append((request, await send(client, prepared, time.perf_counter, request.leave_after_s or 60.0)))
        client.close()
        return ended

    faults = [request.fault(outcome) for request, outcome in asyncio.run(send_all()) if request.leave_after_s is None]
    assert [fault for fault in faults if fault is not None] == []


def test_the_example_client_runs(
    server: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("client", CLIENT)
    assert spec is not None
    assert spec.loader is not None
    client = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(client)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setattr(sys, "argv", ["client.py", "--base-url", f"{server.url}/v1"])
    client.main()
    answer, *_, person = capsys.readouterr().out.strip().splitlines()
    assert answer.startswith("47 + 38")
    assert "'name'" in person
    assert "'age'" in person
