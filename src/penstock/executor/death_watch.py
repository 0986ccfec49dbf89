"""Notices that a process has ended, whether or not anybody waits for it."""

from __future__ import annotations

import os
import select
import subprocess
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection

from penstock.errors import KILLED, WorkerError
from penstock.executor.processes import describe_end, was_killed, where_to_look

# How long a process whose connection has ended may take to end itself.
_EXIT_CODE_TIMEOUT_S = 2.0


class DeathWatch:
    """Calls `tell` once, in a thread of its own, when the first of these connections ends; reads from none of them.

    tell: must not wait for whoever stops the watch.
    """

    def __init__(self, connections: Iterable[Connection], tell: Callable[[], None]) -> None:
        self._tell = tell
        # Its end is reported even to those who ask for nothing, and what there is to read is left to others.
        self._poll = select.poll()
        for connection in connections:
            self._poll.register(connection.fileno(), 0)
        self._stopped, self._stop = os.pipe()
        self._poll.register(self._stopped, 0)
        self._thread = threading.Thread(target=self._run, name="penstock-death-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """To be called before any of the connections is closed here; by `tell`, too, which may drop the last owner."""
        os.close(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        os.close(self._stopped)

    def _run(self) -> None:
        ended = {descriptor for descriptor, _ in self._poll.poll()}
        if self._stopped not in ended:
            self._tell()


def death_of(process: subprocess.Popen[bytes], rank: int, name: str) -> WorkerError:
    """How a rank's process has ended, and what to do about it. name: of the call that waited for it; empty for none."""
    try:
        exit_code: int | None = process.wait(_EXIT_CODE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        exit_code = None
    when = f"while {name} waited for it" if name else "while nobody waited for it"
    return WorkerError(
        f"Rank {rank}, process {process.pid}, {describe_end(exit_code)} {when}. {where_to_look(exit_code)}",
        method=name,
        rank=rank,
        cause_type=KILLED if was_killed(exit_code) else "ProcessEnded",
    )
