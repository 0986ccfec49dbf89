"""Notices that a process has ended, whether or not anybody waits for it."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection


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
        """To be called before any of the connections is closed here."""
        os.close(self._stop)
        self._thread.join()
        os.close(self._stopped)

    def _run(self) -> None:
        ended = {descriptor for descriptor, _ in self._poll.poll()}
        if self._stopped not in ended:
            self._tell()
