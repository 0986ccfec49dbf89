"""The callback of a death watch may stop the watch."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

from penstock.executor.death_watch import DeathWatch
from support.waiting import PATIENCE_S


def test_a_watch_may_be_stopped_by_what_it_tells() -> None:
    ours, theirs = Pipe()
    is_made, is_stopped = threading.Event(), threading.Event()

    def stop() -> None:
        is_made.wait(PATIENCE_S)
        watch.stop()
        is_stopped.set()

    watch = DeathWatch([ours], stop)
    is_made.set()
    theirs.close()
    assert is_stopped.wait(PATIENCE_S)
    ours.close()
