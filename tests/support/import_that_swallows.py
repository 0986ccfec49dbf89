"""Module whose import waits for a signal and swallows its handler's exception, as some libraries do."""

from __future__ import annotations

import contextlib
import signal

with contextlib.suppress(BaseException):
    print("starting", flush=True)
    signal.pause()
