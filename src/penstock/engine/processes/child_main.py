"""Main function of child processes that exchange messages with the process that started them."""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from penstock.contract import encode
from penstock.engine.messages import CoreEnded, CoreLog, CoreMessage, CoreStart, FromCore
from penstock.errors import error_as_data
from penstock.executor.large_messages import receive_message
from penstock.executor.processes import end_with_parent, leave_end_to_parent
from penstock.executor.serialization import loads
from penstock.observability.logging import log_uncaught_errors, send_log

PROGRAM = "from penstock.engine.processes.child_main import main; main()"


class ParentConnection:
    """Connection of a child process to its parent; several threads may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: CoreMessage | CoreLog) -> None:
        """Raises OSError when the parent has closed the connection."""
        data = encode(FromCore(message))
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self) -> bytes | memoryview:
        """Wait for the parent's next message. Raises EOFError or OSError at the end of the connection."""
        return receive_message(self._connection)

    def log(self, fields: dict[str, str | int | float]) -> None:
        """Send a log record, unless the connection is closed."""
        with contextlib.suppress(OSError):
            self.send(CoreLog(fields=fields))


def main() -> None:
    """Run a child process. Arguments: id of the parent process, descriptor of the connection to it, and its role."""
    pid, descriptor = map(int, sys.argv[1:3])
    end_with_parent(pid)
    leave_end_to_parent()
    connection = Connection(descriptor)
    parent = ParentConnection(connection)
    try:
        start: CoreStart = pickle.loads(receive_message(connection))
        send_log(start.log_levels, parent.log)
        log_uncaught_errors()
        run: Callable[[Any, ParentConnection], None]
        run, argument = loads(start.sent)
        run(argument, parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            parent.send(CoreEnded(error=error_as_data(error)))
        raise SystemExit(1) from error
