"""An engine in a process of its own, which is stopped while another one is measured."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import EngineSpec
from benchmarks.peers.environments import python_of, repository

_SHUTDOWN_S = 10.0
# Between waking an engine and its turn.
_AT_REST_S = 0.5


class EngineFailure(Exception):
    """An engine could not load or run; the message says why, and where its log is."""


class EngineProcess:
    """Loads a model and does one job after the other. Model loading is no part of a job's time.

    num_kv_tokens, num_kv_bytes: size of the KV cache, for engines that need it.
    Raises EngineFailure when the model does not load within `timeout_s`.
    """

    def __init__(
        self,
        engine: EngineSpec,
        model: Path,
        work_dir: Path,
        *,
        threads: int,
        num_kv_tokens: int,
        num_kv_bytes: int,
        timeout_s: float = 600,
    ) -> None:
        self.engine = engine
        # Names of the workloads that it was warmed up for.
        self.warm: set[str] = set()
        self._log = work_dir / "logs" / f"{engine.name}-{model.parent.name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        python = sys.executable if engine.environment is None else str(python_of(work_dir, engine.environment))
        read_fd, write_fd = os.pipe()
        options = {"kv_tokens": num_kv_tokens, "kv_bytes": num_kv_bytes, **engine.options}
        arguments = {"model": str(model), "threads": threads, "options": options, "reply_fd": write_fd}
        command = [python, "-m", f"benchmarks.peers.drivers.{engine.driver}", json.dumps(arguments)]
        self._started_at = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=repository(),
                env=_variables(engine, work_dir, threads),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
                # A group of its own, so that what it starts stops and ends with it.
                start_new_session=True,
            )
        os.close(write_fd)
        self._replies = read_fd
        self._unread = b""
        try:
            loaded = self._reply(timeout_s)
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = loaded["versions"]

    def run(self, prompts: list[list[int]], num_outputs: list[int], *, timeout_s: float = 900) -> dict[str, Any]:
        """One job's reply (see `drivers.protocol`), and `since_start`: seconds from the process's start to its end.

        Raises EngineFailure.
        """
        reply = self._ask({"prompts": prompts, "num_outputs": num_outputs}, timeout_s)
        return {**reply, "since_start": reply["finished_at"] - self._started_at}

    def call(self, method: str, *arguments: Any, timeout_s: float = 900) -> Any:
        """Result of another method of the driver. Raises EngineFailure."""
        return self._ask({"call": method, "arguments": arguments}, timeout_s)["result"]

    def pause(self) -> None:
        """Stop it: the idle threads of many engines spin for a while, and would slow others down."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def resume_at_rest(self) -> None:
        """Resume it, and wait: a stopped process did nothing that a server at rest does."""
        self.resume()
        time.sleep(_AT_REST_S)

    def close(self) -> None:
        """End the process and its children. A second call does nothing."""
        if self._replies < 0:
            return
        os.close(self._replies)
        self._replies = -1
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SHUTDOWN_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ask(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        return self._reply(timeout_s)

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            wait_s = deadline - time.monotonic()
            if wait_s <= 0 or not select.select([self._replies], [], [], wait_s)[0]:
                raise EngineFailure(f"no answer within {timeout_s:.0f} s ({self._log})")
            data = os.read(self._replies, 1 << 20)
            if not data:
                raise EngineFailure(f"it ended: {_last_line(self._log)} ({self._log})")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineFailure(reply["error"])
        return reply


def _variables(engine: EngineSpec, work_dir: Path, threads: int) -> dict[str, str]:
    variables = dict(os.environ)
    if engine.environment is not None:
        variables.pop("PYTHONPATH", None)
    return {
        **variables,
        **engine.variables,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "XDG_CACHE_HOME": str(work_dir / "cache"),
    }


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"
