"""Leak checks: processes, threads, descriptors and shared memory that an engine leaves behind."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from support.waiting import PATIENCE_S


@dataclass
class Leftovers:
    """Resources of this process: descendants, threads, and descriptors by kind (sockets, pipes, files by name).

    shared_memory: inodes of anonymous shared memory of the processes passed to `watch`.
    """

    processes: Counter[str] = field(default_factory=Counter)
    descriptors: Counter[str] = field(default_factory=Counter)
    num_threads: int = 0
    shared_memory: set[int] = field(default_factory=set)

    def watch(self, process_ids: Iterable[int]) -> None:
        """Record the shared memory of these processes, which no process may hold afterwards."""
        for process_id in process_ids:
            found = shared_memory_of(process_id)
            assert found, f"process {process_id} shares no memory"
            self.shared_memory |= found

    def count(self) -> None:
        me = psutil.Process()
        self.processes = Counter(f"{child.name()} {child.pid}" for child in me.children(recursive=True))
        self.descriptors = descriptors()
        self.num_threads = me.num_threads()


@contextmanager
def nothing_left() -> Iterator[Leftovers]:
    """Fail if any resource has grown since the start of the block."""
    before = Leftovers()
    before.count()
    yield before
    # Ends may not be complete: a thread that was joined is counted for a moment more.
    deadline = time.monotonic() + PATIENCE_S
    while left := _left(before):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def _left(before: Leftovers) -> dict[str, Any]:
    now = Leftovers()
    now.count()
    left: dict[str, Any] = {
        "processes": now.processes - before.processes,
        "descriptors": now.descriptors - before.descriptors,
        "threads": max(0, now.num_threads - before.num_threads),
        "shared memory": holders_of(before.shared_memory),
    }
    return {what: found for what, found in left.items() if found}


def descriptors() -> Counter[str]:
    """Descriptors of this process by kind; sockets and pipes have no names of their own."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found[re.sub(r":\[\d+\]$", "", os.readlink(link))] += 1
    return found


def shared_memory_of(process_id: int) -> set[int]:
    """Inodes of the anonymous shared memory that a process has open or mapped."""
    folder, found = Path(f"/proc/{process_id}"), set()
    with suppress(OSError):
        for link in (folder / "fd").iterdir():
            with suppress(OSError):
                if os.readlink(link).startswith("/memfd:penstock"):
                    found.add(link.stat().st_ino)
        for line in (folder / "maps").read_text().splitlines():
            if "/memfd:penstock" in line:
                found.add(int(line.split()[4]))
    return found


def holders_of(inodes: set[int]) -> list[int]:
    """Processes of this machine that hold any of this memory."""
    return [process_id for process_id in psutil.pids() if inodes and shared_memory_of(process_id) & inodes]
