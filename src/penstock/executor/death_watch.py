"""Notices that a process has ended, also between calls."""

from __future__ import annotations

import os
import select
import subprocess
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection

from penstock.errors import KILLED, WorkerError
from penstock.executor.processes import describe_end, was_killed, where_to_look

# Timeout for the exit code of a process whose connection has ended.
_EXIT_CODE_TIMEOUT_S = 2.0


class DeathWatch:
    """Calls `on_death` once, in a thread of its own, when the first of these connections ends; reads from none of them.

    on_death: must not wait for the thread that stops the watch.
    """

    def __init__(self, connections: Iterable[Connection], on_death: Callable[[], None]) -> None:
        self._on_death = on_death
        # With an empty event mask poll reports the end of a connection alone, not data to read.
        self._poll = select.poll()
        for connection in connections:
            self._poll.register(connection.fileno(), 0)
        self._stopped, self._stop = os.pipe()
        self._poll.register(self._stopped, 0)
        self._thread = threading.Thread(target=self._run, name="penstock-death-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, before any of the connections is closed here; `on_death` may call it too."""
        os.close(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        os.close(self._stopped)

    def _run(self) -> None:
        ended = {descriptor for descriptor, _ in self._poll.poll()}
        if self._stopped not in ended:
            self._on_death()


def death_of(process: subprocess.Popen[bytes], rank: int, name: str) -> WorkerError:
    """Return the error for the end of a rank's process. name: the call that waited for the rank; empty for none."""
    try:
        exit_code: int | None = process.wait(_EXIT_CODE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        exit_code = None
    when = f"while {name} waited for it" if name else "between calls"
    return WorkerError(
        f"Rank {rank}, process {process.pid}, {describe_end(exit_code)} {when}. {where_to_look(exit_code)}",
        method=name,
        rank=rank,
        cause_type=KILLED if was_killed(exit_code) else "ProcessEnded",
    )
