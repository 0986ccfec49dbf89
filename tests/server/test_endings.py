"""Ends of a server that come at a bad moment: while it starts, while it closes, by SIGKILL."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from penstock.system.temporary_folder import TemporaryFolder
from support.server_process import ServerProcess
from support.waiting import PATIENCE_S, wait_until

SMALL = ("--threads", "1", "--kv-cache-memory-bytes", "32MiB")
# A prompt end takes a fraction of a second; what it must not wait for takes half a minute or longer.
PROMPT_S = 15.0
SLOW = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start_one(*arguments: str, **environment: str) -> ServerProcess:
        log = tmp_path / f"server{len(started)}.log"
        started.append(ServerProcess(log, *SMALL, *arguments, environment=environment))
        return started[-1]

    yield start_one
    for server in started:
        server.close()


def ends_at(server: ServerProcess, number: signal.Signals) -> None:
    """Send a signal: the server and all its processes end promptly."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    begin = time.monotonic()
    server.process.send_signal(number)
    assert server.process.wait(PATIENCE_S) == 0, server.text
    _, alive = psutil.wait_procs(processes, PATIENCE_S)
    assert not alive
    assert time.monotonic() - begin < PROMPT_S
    assert "Traceback" not in server.text


@pytest.mark.parametrize(
    ("number", "num_workers"),
    [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 0, marks=SLOW), pytest.param(signal.SIGTERM, 2, marks=SLOW)],
)
@pytest.mark.slow
def test_a_signal_ends_a_server_whose_core_loads_slowly(
    start: Callable[..., ServerProcess], tmp_path: Path, number: signal.Signals, num_workers: int
) -> None:
    (tmp_path / "slow_worker.py").write_text("import time\ntime.sleep(3600)")
    slow = ("--worker-extension-cls", "slow_worker.Extension", "--api-server-count", "2")
    parallel = ("--tensor-parallel-size", str(num_workers)) if num_workers else ()
    server = start(*slow, *parallel, PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    wait_until(lambda: server.processes("core") and len(server.processes("front-end")) == 2)
    wait_until(lambda: len(server.processes("worker")) == num_workers)
    ends_at(server, number)


@pytest.mark.slow
def test_the_folder_of_a_killed_server_is_removed_by_the_next_one(start: Callable[..., ServerProcess]) -> None:
    # A Unix socket's path is short.
    with tempfile.TemporaryDirectory() as name, TemporaryFolder("penstock-", Path(name)) as in_use:
        place = Path(name)
        killed = start(TMPDIR=name)
        wait_until(lambda: list(place.glob("*/broker")), "the server has its folder")
        (left,) = (path.parent for path in place.glob("*/broker"))
        processes = psutil.Process(killed.process.pid).children(recursive=True)
        killed.process.kill()
        psutil.wait_procs(processes, PATIENCE_S)
        assert left.exists()
        following = start(TMPDIR=name)
        wait_until(lambda: {*place.glob("*/broker")} - {left / "broker"}, "the next one has its own")
        assert not left.exists()
        assert in_use.path.exists()
        ends_at(following, signal.SIGTERM)
        assert list(place.iterdir()) == [in_use.path]


@pytest.mark.slow
def test_a_further_signal_ends_a_server_whose_core_does_not_close(start: Callable[..., ServerProcess]) -> None:
    server = start()
    server.wait_until_ready()
    server.processes("core")[0].suspend()
    server.process.send_signal(signal.SIGTERM)
    # Without requests the front ends end at once, and the broker asks its core to close.
    wait_until(lambda: not server.processes("front-end"))
    time.sleep(0.5)
    assert server.process.poll() is None
    ends_at(server, signal.SIGTERM)
