"""Resource limits of this process: control groups and CPU affinity."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# Most of the memory that the KV cache takes by default; half on a CPU machine leaves room for other processes.
DEFAULT_MEMORY_FRACTION = {"cpu": 0.5, "cuda": 0.9}
# What it takes of that unless one request needs more: a CPU machine's memory is its user's, too.
USUAL_MEMORY_FRACTION = {"cpu": 0.25, "cuda": 0.9}

CGROUP_ROOT = Path("/sys/fs/cgroup")
SELF_CGROUP = Path("/proc/self/cgroup")
DEVICES = Path("/sys/devices/system")
# Version 1 encodes "no limit" as a number near 2**63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """total_bytes: minimum of the host's memory and the limits of all enclosing control groups.
    free_bytes: available within all of them.
    """

    total_bytes: int
    free_bytes: int


def memory_limit(root: Path = CGROUP_ROOT, membership: Path = SELF_CGROUP) -> MemoryLimit:
    """Memory limit of this process."""
    host = psutil.virtual_memory()
    total, free = host.total, host.available
    for folder in _groups(root, membership, "memory"):
        limit = _read_number(folder / "memory.max", folder / "memory.limit_in_bytes")
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _read_number(folder / "memory.current", folder / "memory.usage_in_bytes") or 0
        used -= min(used, _reclaimable_bytes(folder))
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return MemoryLimit(total, free)


def usable_cores(root: Path = CGROUP_ROOT, membership: Path = SELF_CGROUP, devices: Path = DEVICES) -> int:
    """Physical cores within affinity and CPU quota, hardware threads of one core counted once; at least 1."""
    return min(len(physical_cores(usable_cpus(), devices)), cpu_quota(root, membership) or sys.maxsize)


def usable_cpus() -> frozenset[int]:
    """Logical CPUs of this process's affinity."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(cpus: Iterable[int], devices: Path = DEVICES) -> list[frozenset[int]]:
    """Group logical CPUs by physical core, in order."""
    cores: dict[str, set[int]] = {}
    for cpu in sorted(cpus):
        topology = devices / "cpu" / f"cpu{cpu}" / "topology"
        core = _read_text(topology / "core_cpus_list", topology / "thread_siblings_list")
        cores.setdefault(f"alone {cpu}" if core is None else core, set()).add(cpu)
    return [frozenset(core) for core in cores.values()]


def memory_nodes(cpus: Iterable[int], devices: Path = DEVICES) -> dict[int, frozenset[int]]:
    """Group logical CPUs by NUMA node number; empty without NUMA nodes."""
    wanted = frozenset(cpus)
    nodes: dict[int, frozenset[int]] = {}
    for folder in (devices / "node").glob("node[0-9]*"):
        listed = _read_text(folder / "cpulist")
        shared = wanted & parse_cpu_list(listed or "")
        if shared:
            nodes[int(folder.name.removeprefix("node"))] = shared
    return dict(sorted(nodes.items()))


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a CPU list of the kernel: "0-3,8"."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def cpu_quota(root: Path = CGROUP_ROOT, membership: Path = SELF_CGROUP) -> int | None:
    """CPU quota of the control groups in whole CPUs, at least 1; None without a limit."""
    quotas = [quota for folder in _groups(root, membership, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, math.floor(min(quotas))) if quotas else None


def throttled_s(root: Path = CGROUP_ROOT, membership: Path = SELF_CGROUP) -> float | None:
    """Seconds for which the control groups' quota has stopped processes so far; None where they are not counted."""
    counts = [_read_throttled(folder / "cpu.stat") for folder in _groups(root, membership, "cpu")]
    return max((count for count in counts if count is not None), default=None)


def _groups(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Yield the enclosing control groups of this process, innermost first, of versions 1 and 2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        inner = base / path.lstrip("/")
        while True:
            yield inner
            if inner == base or base not in inner.parents:
                break
            inner = inner.parent


def _cpu_quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us = _read_number(folder / "cpu.cfs_quota_us")
    period_us = _read_number(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _read_throttled(path: Path) -> float | None:
    for name, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):
        count = _read_field(path, name)
        if count is not None:
            return count * unit
    return None


def _read_number(*paths: Path) -> int | None:
    for path in paths:
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            continue
    return None


def _read_text(*paths: Path) -> str | None:
    for path in paths:
        try:
            return path.read_text().strip()
        except OSError:
            continue
    return None


def _reclaimable_bytes(folder: Path) -> int:
    """Inactive page cache, which the kernel reclaims before it refuses memory."""
    return _read_field(folder / "memory.stat", "inactive_file", "total_inactive_file") or 0


def _read_field(path: Path, *names: str) -> int | None:
    """First of the fields in a file with a name and a number per line; None without one."""
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in names:
                return int(value)
    except (OSError, ValueError):
        pass
    return None
