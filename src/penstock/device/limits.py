"""What this process may really use of its machine: control groups and CPU affinity, not the host's totals."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# Of a CPU machine half of what is there: the rest of the machine stays usable, and so do other engines.
DEFAULT_MEMORY_FRACTION = {"cpu": 0.5, "cuda": 0.9}

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_SELF_CGROUP = Path("/proc/self/cgroup")
# Version 1 writes "no limit" as a number near 2**63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """total_bytes: the tightest of the host's memory and the limits of the control groups around this process.
    free_bytes: what can still be taken within all of them.
    """

    total_bytes: int
    free_bytes: int


def memory_limit(root: Path = _CGROUP_ROOT, membership: Path = _SELF_CGROUP) -> MemoryLimit:
    """The memory that this process may use, in bytes."""
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


def usable_cores(root: Path = _CGROUP_ROOT, membership: Path = _SELF_CGROUP) -> int:
    """Cores within this process's affinity and CPU quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups(root, membership, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            cores = min(cores, max(1, math.floor(quota)))
    return cores


def _groups(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """The control groups around this process, innermost first, of versions 1 and 2."""
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


def _read_number(*paths: Path) -> int | None:
    for path in paths:
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            continue
    return None


def _reclaimable_bytes(folder: Path) -> int:
    """Page cache of files not recently used, which the kernel gives up before it refuses memory."""
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
