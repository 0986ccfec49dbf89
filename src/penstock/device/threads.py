"""Number and placement of CPU threads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

from penstock.device import limits


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """cpus: logical CPUs to bind the threads to; None for no binding. reason: for the log."""

    num_threads: int
    cpus: frozenset[int] | None
    reason: str


def plan_threads(
    requested: int | None,
    *,
    cpus: frozenset[int] | None = None,
    quota: int | None = None,
    devices: Path = limits.DEVICES,
    rank: int = 0,
    num_ranks: int = 1,
) -> ThreadPlan:
    """Plan the threads of products in which all take part.

    One per physical core of the process's affinity `cpus` (hardware threads share a core's arithmetic), within its CPU
    quota. With cores on several NUMA nodes, the node with the most cores is used: every thread reads its share of the
    weights in each product, and with remote memory all wait for the slowest. A requested number is used as it is, and
    bound to one node if it fits there.

    rank, num_ranks: of processes on this machine; each gets cores of its own, if there are enough.
    """
    cpus = limits.usable_cpus() if cpus is None else cpus
    if num_ranks > 1:
        return _plan_share(requested, cpus, quota, devices, rank, num_ranks)
    nodes = limits.memory_nodes(cpus, devices)
    bound: frozenset[int] | None = None
    place = ""
    if len(nodes) > 1:
        node = max(nodes, key=lambda number: len(limits.physical_cores(nodes[number], devices)))
        bound = nodes[node]
        place = f" of node {node}, one of {len(nodes)}"
    cores = len(limits.physical_cores(cpus if bound is None else bound, devices))
    if requested is not None:
        if bound is None or requested > cores:
            return ThreadPlan(requested, None, "as asked for")
        return ThreadPlan(requested, bound, f"as asked for, on cores{place}")
    if quota is not None and quota < cores:
        return ThreadPlan(quota, bound, f"the quota of CPU time, {cores} cores{place}")
    return ThreadPlan(cores, bound, f"one per core{place}")


def _plan_share(
    requested: int | None, cpus: frozenset[int], quota: int | None, devices: Path, rank: int, num_ranks: int
) -> ThreadPlan:
    """Plan one rank's threads: equal numbers of adjacent cores, so that most ranks are on one node."""
    nodes = limits.memory_nodes(cpus, devices) or {0: cpus}
    cores = [core for node in nodes.values() for core in limits.physical_cores(node, devices)]
    size = len(cores) // num_ranks
    own = cores[rank * size : (rank + 1) * size]
    if requested is not None:
        num_threads, why = max(1, requested // num_ranks), f"{requested} as asked for, of {num_ranks} ranks"
    else:
        available = len(cores) if quota is None else min(quota, len(cores))
        num_threads, why = max(1, available // num_ranks), f"{available} cores of {num_ranks} ranks"
    return ThreadPlan(num_threads, frozenset().union(*own) if 0 < num_threads <= size else None, why)


class Binding:
    """CPU binding of this process's threads, on behalf of all its devices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: set[Hashable] = set()
        self._kept_to: set[frozenset[int]] = set()
        self._before: frozenset[int] = frozenset()

    def bind(self, owner: Hashable, cpus: frozenset[int] | None) -> None:
        """Bind the calling thread, and those that it starts, to the CPUs, until the last owner's `release`.

        cpus: None requests no binding, and keeps another owner's for as long as this one is bound.
        """
        with self._lock:
            if cpus is not None and hasattr(os, "sched_setaffinity"):
                if not self._owners:
                    self._before = limits.usable_cpus()
                os.sched_setaffinity(0, cpus)
                self._kept_to.add(cpus)
            if self._kept_to:
                self._owners.add(owner)

    def release(self, owner: Hashable) -> None:
        """Release the owner's binding. After the last one, all bound threads get their original affinity back."""
        with self._lock:
            if owner not in self._owners:
                return
            self._owners.remove(owner)
            if self._owners:
                return
            for thread in map(int, os.listdir("/proc/self/task")):
                # Threads may end meanwhile.
                with contextlib.suppress(ProcessLookupError):
                    if os.sched_getaffinity(thread) in self._kept_to:
                        os.sched_setaffinity(thread, self._before)
            self._kept_to.clear()


BINDING = Binding()
