"""Routes of sleep and pauses, and what probes say meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from penstock.engine.async_engine import AsyncEngine
from support.server_process import ServerProcess
from support.servers import Served, serving
from support.waiting import wait_until

KEY = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    options: dict[str, Any] = {
        "kv_cache_memory_bytes": "4MiB",
        "num_threads": 1,
        "max_num_seqs": 4,
        "enable_multiprocessing": False,
    }
    engine = AsyncEngine("demo", **options)
    with serving(engine, served_model_name=("demo",), enable_admin=True, admin_api_key="boss") as served:
        yield served


def post(server: Served, path: str) -> tuple[int, Any]:
    reply = server.post(path, b"", **KEY)
    return reply.status, reply.json if reply.body else None


def get(server: Served, path: str) -> Any:
    return server.request("GET", path, **KEY).json


def said(server: Served) -> tuple[int, Any]:
    reply = server.post("/v1/completions", {"model": "demo", "prompt": "ROMEO:", "max_tokens": 8, "temperature": 0})
    return reply.status, reply.json["choices"][0]["text"] if reply.status == 200 else reply.error


def test_a_server_sleeps_and_wakes_in_parts(server: Served) -> None:
    expected = said(server)
    assert expected[0] == 200
    assert post(server, "/sleep?level=1") == (200, None)
    assert get(server, "/is_sleeping") == {"is_sleeping": True}
    assert get(server, "/is_paused") == {"is_paused": True}
    status, error = said(server)
    assert (status, error["code"], error["type"]) == (503, "engine_asleep", "service_unavailable_error")
    assert "sleeping (level 1: weights, kv_cache)" in error["message"]
    status, refused = post(server, "/sleep?level=2")
    assert (status, refused["error"]["code"]) == (409, "engine_asleep")
    assert post(server, "/wake_up?tags=weights") == (200, None)
    assert get(server, "/is_sleeping") == {"is_sleeping": True}
    assert post(server, "/wake_up?tags=weights&tags=kv_cache") == (200, None)
    assert get(server, "/is_sleeping") == {"is_sleeping": False}
    assert said(server) == expected


def test_a_server_pauses(server: Served) -> None:
    expected = said(server)
    assert post(server, "/pause?mode=keep") == (200, {"status": "paused"})
    assert get(server, "/is_paused") == {"is_paused": True}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(said, server)
        wait_until(lambda: server.engine.get_num_unfinished_requests() == 1, "the request waits")
        assert not waiting.done()
        assert post(server, "/resume") == (200, {"status": "resumed"})
        assert waiting.result() == expected
    assert get(server, "/is_paused") == {"is_paused": False}


@pytest.mark.parametrize("path", ["/sleep?level=3", "/sleep?mode=later", "/wake_up?tags=all", "/pause?mode=x"])
def test_wrong_fields_are_refused(server: Served, path: str) -> None:
    assert post(server, path)[0] == 400


def test_the_routes_need_the_admins_key(server: Served) -> None:
    for path in ("/sleep", "/wake_up", "/pause", "/resume"):
        assert server.post(path, b"").status == 401
    for path in ("/is_sleeping", "/is_paused"):
        assert server.request("GET", path).status == 401


@pytest.mark.slow
def test_a_server_that_sleeps_lives_is_not_ready_and_sleeps_on_when_its_processes_are_lost(tmp_path: Path) -> None:
    key = ("--enable-admin", "--admin-api-key", "boss")
    small = ("--threads", "1", "--kv-cache-memory-bytes", "16MiB")
    server = ServerProcess(tmp_path / "log", *small, *key)
    try:
        server.wait_until_ready()

        def ask(method: str, path: str) -> tuple[int, Any]:
            request = Request(f"{server.url}{path}", b"" if method == "POST" else None, KEY, method=method)
            try:
                with urlopen(request, timeout=120) as reply:
                    status, content = reply.status, reply.read()
            except HTTPError as error:
                status, content = error.code, error.read()
            return status, json.loads(content) if content else None

        def complete() -> str:
            client = server.client()
            return client.completions.create(model="demo", prompt="ROMEO:", max_tokens=8, temperature=0).choices[0].text

        expected = complete()
        # Probes know of a sleep by the time that its call has returned.
        for _ in range(3):
            assert ask("POST", "/sleep") == (200, None)
            assert ask("GET", "/ready")[0] == 503
            assert ask("POST", "/wake_up") == (200, None)
            assert ask("GET", "/ready")[0] == 200
        assert ask("POST", "/sleep") == (200, None)
        for role in ("core", "broker", "front-end"):
            wait_until(lambda: ask("GET", "/ready")[0] == 503)
            assert ask("GET", "/health")[0] == 200
            assert ask("GET", "/ready")[1]["state"] == "sleeping (level 1: weights, kv_cache)"
            pids = {one.pid for one in server.processes(role)}
            for one in server.processes(role):
                one.kill()
            wait_until(lambda: server.processes(role) and pids.isdisjoint(one.pid for one in server.processes(role)))  # noqa: B023
            wait_until(lambda: _is_asleep(ask))
        assert ask("POST", "/wake_up") == (200, None)
        wait_until(lambda: ask("GET", "/ready")[0] == 200)
        assert complete() == expected
    finally:
        server.close()


def _is_asleep(ask: Callable[[str, str], tuple[int, Any]]) -> bool:
    try:
        return bool(ask("GET", "/ready")[1].get("state", "").startswith("sleeping (level 1"))
    except OSError:
        return False
