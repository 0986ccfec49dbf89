"""To import this takes long, and nothing interrupts it: as some libraries do, it goes on after an exception."""

from __future__ import annotations

import contextlib
import time

with contextlib.suppress(BaseException):
    print("starting", flush=True)
    time.sleep(10)
