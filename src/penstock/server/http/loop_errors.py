"""Errors of the event loop that no request has, such as a connection that cannot be accepted."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from typing import Any

logger = logging.getLogger(__name__)
_LOG_INTERVAL_S = 60.0


class LoopErrors:
    """Exception handler of a server's event loop.

    While file descriptors lack, asyncio reports each connection that it cannot accept, thousands a second; the log gets
    a line a minute. Other errors are logged as asyncio does.
    """

    def __init__(self) -> None:
        self._next_log_s = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if now >= self._next_log_s:
            self._next_log_s = now + _LOG_INTERVAL_S
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.error(
                "Connections wait, since the front end has no file descriptor for them: its limit is %d. Raise it "
                "(ulimit -n, LimitNOFILE), or add front ends (api_server_count). %s",
                limit,
                error.strerror,
            )
