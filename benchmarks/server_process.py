"""A server in processes of its own: its start, its end, and its memory, descriptors and threads meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

_READY_S, _END_S = 300.0, 60.0
_SHOWN_LOG = 4000


@dataclass(frozen=True)
class Usage:
    """Resources of all processes of a server. memory_bytes: proportional set size, so shared pages count once."""

    memory_bytes: int
    num_processes: int
    num_threads: int
    num_descriptors: int
    processor_s: float


class ServerProcess:
    """Server that runs until its block ends.

    command: of the server, without --host and --port. log: file of its output.
    url: such as http://127.0.0.1:8000.

    Raises RuntimeError, with the end of the log, if it ends or is not ready in time.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=file, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> ServerProcess:
        try:
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self._process.pid

    def usage(self) -> Usage:
        """Resources that are in use now. Raises RuntimeError if the server has ended."""
        self._check_alive()
        counts = [_usage_of(process) for process in processes_of(self._process.pid)]
        columns = zip(*counts, strict=True)
        memory, threads, descriptors, seconds = (sum(column) for column in columns)
        return Usage(int(memory), len(counts), int(threads), int(descriptors), seconds)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            self._check_alive()
            with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                return
            time.sleep(0.1)
        raise RuntimeError(f"The server was not ready within {_READY_S:g} s. Its log ends with:\n{self._end_of_log()}")

    def _check_alive(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(
                f"The server has ended with code {self._process.returncode}. Its log ends with:\n{self._end_of_log()}"
            )

    def _end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-_SHOWN_LOG:]

    def _end(self) -> None:
        children = processes_of(self._process.pid)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            print(f"The server did not end within {_END_S:g} s of SIGTERM; it is killed.", file=sys.stderr)
            self._process.kill()
            self._process.wait()
        _, left = psutil.wait_procs(children, timeout=5)
        for process in left:
            print(f"The server left process {process.pid}; it is killed.", file=sys.stderr)
            with suppress(psutil.NoSuchProcess):
                process.kill()


def serve_command(model: str, *options: str) -> list[str]:
    """Command of `penstock serve` with this Python."""
    return [sys.executable, "-m", "penstock", "serve", model, *options]


def processes_of(pid: int) -> list[psutil.Process]:
    """A process and its descendants; none if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _usage_of(process: psutil.Process) -> tuple[float, float, float, float]:
    """Bytes of memory, threads, descriptors, seconds of CPU; zeros if the process has ended."""
    try:
        with process.oneshot():
            times = process.cpu_times()
            memory = process.memory_full_info().pss
            return memory, process.num_threads(), process.num_fds(), times.user + times.system
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0, 0, 0, 0


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def quiet_environment() -> None:
    """Keep the engines of this process and its children from logging."""
    os.environ.setdefault("PENSTOCK_LOG_LEVEL", "warning")
