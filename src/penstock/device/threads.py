"""How many threads compute on the CPU, and where they run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from penstock.device import limits


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """cpus: logical CPUs that the threads must stay on; None leaves them to the system. reason: for the log."""

    num_threads: int
    cpus: frozenset[int] | None
    reason: str


def plan_threads(
    requested: int | None,
    *,
    cpus: frozenset[int] | None = None,
    quota: int | None = None,
    devices: Path = limits.DEVICES,
) -> ThreadPlan:
    """Threads for products that all take part in.

    One per physical core of the process's affinity `cpus` (hardware threads of a core share its arithmetic), within its
    quota of CPU time. Where those cores are on several NUMA nodes, one node's are taken and kept to, the one with the
    most: every thread reads its share of the weights in each product, and at another node's memory all wait for the
    slowest. A number that was asked for is taken as it is, and kept to one node if it fits there.
    """
    cpus = limits.usable_cpus() if cpus is None else cpus
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


def bind(plan: ThreadPlan) -> None:
    """Keep the calling thread, and those that it starts, to the plan's CPUs."""
    if plan.cpus is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, plan.cpus)
