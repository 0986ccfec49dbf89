"""Live view of an `LLM` at a Unix socket."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.top import live_client, read_live
from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.live import live_server
from penstock.engine.session import Session
from penstock.errors import ConfigError
from support.fake_engine import FakeCore, write_model
from support.waiting import PATIENCE_S, wait_until

PARAMS = SamplingParams(max_tokens=5)


def session_of(tmp_path: Path, core: FakeCore, name: str = "live.sock") -> Session:
    config = EngineConfig.create(str(write_model(tmp_path / "model")), live_view=str(tmp_path / name), max_num_seqs=2)
    return Session(config, load_core=lambda config: core)


def read(path: Path, after: float = 0.0) -> dict[str, Any]:
    return read_live(live_client("", str(path), None), after)


def test_a_view_sees_the_requests_during_a_step(tmp_path: Path) -> None:
    core, path, seen = FakeCore(), tmp_path / "live.sock", []
    core.on_step = lambda step: seen.append(read(path))
    session = session_of(tmp_path, core)
    assert read(path)["requests"]["unfinished"] == 0
    for _ in session.run([session.accept([9, 10 + number], PARAMS) for number in range(3)]):
        pass
    assert seen[2]["requests"] == {"running": 3, "waiting": 0, "queued": 1, "unfinished": 3, "max_running": 2}
    assert seen[0]["counters"]["finished_requests"] == 0
    wait_until(lambda: read(path)["counters"]["finished_requests"] == 3)
    assert list(seen[0]["kv_cache"].items())[:3] == [("num_blocks", 8), ("used", 2), ("cached", 0)]
    assert seen[0]["cores"]["all"] == 1
    assert seen[0]["model"] == str(tmp_path / "model")
    session.close()
    session.close()
    assert not path.exists()


def test_a_step_that_lasts_is_a_stall(tmp_path: Path) -> None:
    def stalled_s() -> float:
        return float(read(tmp_path / "live.sock")["cores"]["stalled_s"])

    core = FakeCore()
    core.on_step = lambda step: wait_until(lambda: stalled_s() > 0.05)
    session = session_of(tmp_path, core)
    assert stalled_s() == 0.0
    for _ in session.run([session.accept([9], SamplingParams(max_tokens=1))]):
        pass
    assert stalled_s() == 0.0
    session.close()


def test_a_session_that_is_forgotten_removes_its_socket_and_thread(tmp_path: Path) -> None:
    session = session_of(tmp_path, FakeCore())
    assert "penstock-live-view" in [thread.name for thread in threading.enumerate()]
    del session
    gc.collect()
    assert not (tmp_path / "live.sock").exists()
    assert "penstock-live-view" not in [thread.name for thread in threading.enumerate()]


def test_a_core_that_does_not_start_leaves_no_socket(tmp_path: Path) -> None:
    config = EngineConfig.create(str(write_model(tmp_path / "model")), live_view=tmp_path / "live.sock")

    def load_core(config: EngineConfig) -> FakeCore:
        raise ConfigError("too large")

    with pytest.raises(ConfigError, match="too large"):
        Session(config, load_core=load_core)
    assert not (tmp_path / "live.sock").exists()


def test_a_stale_socket_is_replaced_and_one_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "live.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    session = session_of(tmp_path, FakeCore())
    assert read(path)["requests"]["unfinished"] == 0
    with pytest.raises(ConfigError, match=r"live_view='.*live.sock' cannot be listened on: another process listens"):
        session_of(tmp_path, FakeCore())
    assert read(path)["requests"]["unfinished"] == 0
    session.close()


def test_a_file_of_another_kind_is_kept(tmp_path: Path) -> None:
    (tmp_path / "live.sock").write_text("mine")
    with pytest.raises(ConfigError, match=r"live_view='.*' cannot be listened on: it is a file of another kind"):
        session_of(tmp_path, FakeCore())
    assert (tmp_path / "live.sock").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"live_view='.*' cannot be listened on: .*too long. Give another path"):
        session_of(tmp_path, FakeCore(), "long" * 40)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (9000, "live_view=9000 is not valid. Allowed: the path of a Unix socket"),
        ("", "live_view='' is not valid. Allowed"),
        ("http://127.0.0.1:9000", "Allowed: the path of a Unix socket"),
        ("localhost:9000", "Allowed: the path of a Unix socket"),
        ("/nowhere/live.sock", "/nowhere is not a folder. Create it"),
    ],
)
def test_what_is_no_path_of_a_socket_is_refused(given: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig.create("demo", live_view=given)


def test_a_server_and_an_engine_of_torchrun_refuse_the_option(tmp_path: Path) -> None:
    """And an engine of torchrun refuses the recording of steps, too."""
    path = tmp_path / "live.sock"
    with pytest.raises(ConfigError, match="is an option of LLM. Leave it out: a server has the route /live"):
        AsyncEngine("demo", live_view=path)
    with pytest.raises(ConfigError, match="each rank would listen there"):
        EngineConfig.create("demo", live_view=path, distributed_executor_backend="external_launcher")
    with pytest.raises(ConfigError, match="each rank would write it"):
        EngineConfig.create("demo", record=path, distributed_executor_backend="external_launcher")


def test_a_wrong_request_and_a_silent_client_leave_it_working(tmp_path: Path) -> None:
    path = tmp_path / "live.sock"
    session = session_of(tmp_path, FakeCore())
    for line, status in ((b"GET /live?after=x", b"400"), (b"GET /metrics", b"404"), (b"POST /live", b"501")):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(line + b" HTTP/1.1\r\n\r\n")
            assert client.recv(100).split()[1] == status
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(path))
    assert read(path)["requests"]["unfinished"] == 0
    session.close()


def test_a_client_that_never_ends_its_request_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "_CLIENT_TIMEOUT_S", 0.1)
    path, was_read = tmp_path / "live.sock", threading.Event()
    session = session_of(tmp_path, FakeCore())

    def trickle(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not was_read.wait(0.02):
                client.sendall(b"x")

    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(path))
        thread = threading.Thread(target=trickle, args=(slow,))
        thread.start()
        assert read(path)["requests"]["unfinished"] == 0
        was_read.set()
        thread.join()
    session.close()


def top(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["top", "--once", *arguments])
    return result.output


def test_top_refuses_two_addresses_and_a_socket_without_a_listener(tmp_path: Path) -> None:
    path = str(tmp_path / "live.sock")
    assert "are two addresses" in top("--uds", path, "--url", "http://localhost:1")
    assert "cannot be read: No such file" in top("--uds", path).replace("[Errno 2] ", "")


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", ", enable_multiprocessing=True"])
def test_top_shows_an_llm_in_another_process_while_it_generates(tmp_path: Path, options: str) -> None:
    path = tmp_path / "live.sock"
    source = f"""
        from penstock import LLM, SamplingParams
        with LLM("demo", num_threads=1, kv_cache_memory_bytes="8MiB", live_view={str(path)!r}{options}) as llm:
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            while True:
                llm.generate(["ROMEO: secret"] * 3, params, use_tqdm=False)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], env={**os.environ})
    try:
        wait_until(lambda: path.exists() or process.poll() is not None)
        wait_until(lambda: sum(step["decode"] for step in read(path)["steps"]) > 20)
        found = read(path)
        assert all(step["seconds"] > 0 and step["core"] == 0 for step in found["steps"])
        assert found["steps"] == sorted(found["steps"], key=lambda step: step["ended_at"])
        assert found["counters"]["computed_tokens"] >= sum(step["decode"] for step in found["steps"])
        wait_until(lambda: read(path)["counters"]["generated_tokens"] >= 120)
        assert "secret" not in json.dumps(found)
        shown = top("--uds", str(path))
        assert "demo  ● ready" in shown
        assert f"unix:{path}" in shown
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    # A killed process leaves its socket, and the next one replaces it.
    assert path.exists()
    session_of(tmp_path, FakeCore()).close()
    assert not path.exists()
