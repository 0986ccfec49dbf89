"""Python's garbage collector, out of the way while large libraries are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Collect no garbage within the block, unless it is off anyway.

    Importing torch makes hundreds of thousands of objects that all stay, and the collector, which counts objects, looks
    through all of them several times over.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
