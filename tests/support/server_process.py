"""`penstock serve` as a process of its own, for tests of its processes and signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from openai import AsyncOpenAI, OpenAI

from support.waiting import PATIENCE_S

_ADDRESS = re.compile(r"Ready after [\d.]+ s: (\S+) serves")


class ServerProcess:
    """A server on a free port. log: file that gets its output. arguments: further ones of `penstock serve`."""

    def __init__(
        self, log: Path, *arguments: str, model: str = "demo", environment: dict[str, str] | None = None
    ) -> None:
        command = [sys.executable, "-m", "penstock", "serve", model, "--port", "0", *arguments]
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
            )
        self.url = ""

    def wait_until_ready(self, patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while (match := _ADDRESS.search(self.text)) is None:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)
        self.url = match[1]

    @property
    def text(self) -> str:
        """Its output so far."""
        return self.log.read_text(errors="replace")

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S, **options)

    def async_client(self, **options: Any) -> AsyncOpenAI:
        limits: dict[str, Any] = {"max_retries": 0, "timeout": PATIENCE_S, **options}
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", **limits)

    def processes(self, role: str) -> list[psutil.Process]:
        """Its processes of a role: "broker", "front-end", "core", or "worker"."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        if role == "worker":
            return [one for one in found if "worker_process" in " ".join(_arguments(one))]
        return [one for one in found if _arguments(one)[-1:] == [role]]

    def stop(self) -> int:
        """Send SIGTERM and wait. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
