"""Server of a live view on a Unix socket, for engines without an HTTP server."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import msgspec

from penstock.engine.guards import OwningProcess
from penstock.engine.live.live_view import LiveView
from penstock.observability.unix_socket import listen_on_path

logger = logging.getLogger(__name__)
_BACKLOG = 16
# Longest time for the request of a client, and for its answer: there is one thread for all.
_CLIENT_TIMEOUT_S = 2.0
_MOST_REQUEST_BYTES = 16 << 10


class LiveServer:
    """Answers `/live` at a Unix socket, in one thread.

    Raises ConfigError, which names the option live_view, when the path cannot be listened on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = OwningProcess()
        self._is_closed = False
        self._listener = listen_on_path(str(path), "live_view", _BACKLOG)
        self._thread: threading.Thread | None = None

    def start(self, view: LiveView) -> None:
        """Answer connections from now on; those before have waited."""
        self._thread = threading.Thread(
            target=_serve, args=(self._listener, view), name="penstock-live-view", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the socket. A second call does nothing, nor does one in a fork."""
        if self._is_closed or not self._owner.is_here():
            return
        self._is_closed = True
        self._path.unlink(missing_ok=True)
        # Ends `accept` in the thread.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _CLIENT_TIMEOUT_S)
        self._listener.close()


def _serve(listener: socket.socket, view: LiveView) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            try:
                _Handler(connection, view)
            except OSError:
                # The client is gone.
                pass
            except Exception:
                logger.exception("The live view could not answer")


def _request_head(connection: socket.socket) -> bytes:
    """Bytes of a request up to its empty line. Raises TimeoutError where it does not arrive in time."""
    deadline, head = time.monotonic() + _CLIENT_TIMEOUT_S, b""
    while b"\r\n\r\n" not in head and len(head) < _MOST_REQUEST_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(_MOST_REQUEST_BYTES)
        if not data:
            break
        head += data
    return head


class _Handler(BaseHTTPRequestHandler):
    """Answer to one request, from its bytes in `rfile` to those in `wfile`."""

    def __init__(self, connection: socket.socket, view: LiveView) -> None:
        self._view = view
        super().__init__(connection, "", cast(Any, None))

    def setup(self) -> None:
        self.rfile, self._answer = BytesIO(_request_head(self.request)), BytesIO()
        self.wfile = self._answer

    def finish(self) -> None:
        # The timeout is of the whole call.
        self.request.settimeout(_CLIENT_TIMEOUT_S)
        self.request.sendall(self._answer.getvalue())

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path != "/live":
            self.send_error(404, "There is only the route /live here")
            return
        try:
            after = float(parse_qs(url.query).get("after", ["0"])[0])
        except ValueError:
            self.send_error(400, "after is a Unix time in seconds")
            return
        body = msgspec.json.encode(self._view.read(after))
        self.send_response(200)
        for name, value in (
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log line per request."""
