"""Unix sockets that listen at a path."""

from __future__ import annotations

import os
import socket
import stat

from penstock.errors import ConfigError

_PROBE_TIMEOUT_S = 1.0


def listen_on_path(path: str, option: str, backlog: int) -> socket.socket:
    """Listen on a Unix socket at a path; the socket of a process that has ended is replaced.

    option: name of the option that has the path, for errors.
    Raises ConfigError where another process listens, or a file of another kind is, or the path cannot be had.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale(path)
        listener.bind(path)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise ConfigError(f"{option}={path!r} cannot be listened on: {reason}. Give another path.") from error
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket of a process that has ended. Raises OSError for anything else at the path."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise FileExistsError(0, "it is a file of another kind")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except TimeoutError:
            pass
    raise FileExistsError(0, "another process listens on it")
