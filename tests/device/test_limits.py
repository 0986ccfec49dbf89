"""Resource limits, read from control groups in the kernel's format."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from penstock.device.limits import memory_limit, throttled_s, usable_cores
from penstock.device.throttling import ThrottleWatch

MIB = 1 << 20


def _write(folder: Path, **files: str | int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    path = tmp_path / "self_cgroup"
    path.write_text("0::/pod/container\n")
    return path


def test_the_tightest_limit_of_all_groups_counts(tmp_path: Path, membership: Path) -> None:
    root = tmp_path / "cgroup"
    _write(root)
    _write(root / "pod", memory__max=100 * MIB, memory__current=30 * MIB)
    _write(root / "pod/container", memory__max="max", memory__current=20 * MIB)
    limit = memory_limit(root, membership)
    assert limit.total_bytes == 100 * MIB
    assert limit.free_bytes == 70 * MIB


def test_page_cache_that_can_be_dropped_is_free(tmp_path: Path, membership: Path) -> None:
    root = tmp_path / "cgroup"
    _write(
        root / "pod/container",
        memory__max=100 * MIB,
        memory__current=90 * MIB,
        memory__stat=f"anon 1\ninactive_file {50 * MIB}\nactive_file 5",
    )
    assert memory_limit(root, membership).free_bytes == 60 * MIB


def test_version_one_groups(tmp_path: Path) -> None:
    membership = tmp_path / "self_cgroup"
    membership.write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    root = tmp_path / "cgroup"
    _write(root / "memory/job", memory__limit_in_bytes=64 * MIB, memory__usage_in_bytes=4 * MIB)
    _write(root / "cpu,cpuacct/job", cpu__cfs_quota_us=100_000, cpu__cfs_period_us=100_000)
    assert memory_limit(root, membership).total_bytes == 64 * MIB
    assert memory_limit(root, membership).free_bytes == 60 * MIB
    assert usable_cores(root, membership) == 1


def test_without_limits_the_host_counts(tmp_path: Path, membership: Path) -> None:
    limit = memory_limit(tmp_path / "nowhere", tmp_path / "nothing")
    assert limit.total_bytes == psutil.virtual_memory().total
    assert 0 < limit.free_bytes <= limit.total_bytes


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("150000 100000", 1)])
def test_a_cpu_quota_limits_the_threads_and_never_to_none(
    tmp_path: Path, membership: Path, quota: str, cores: int
) -> None:
    root = tmp_path / "cgroup"
    _write(root / "pod/container", cpu__max=quota)
    assert usable_cores(root, membership) == cores


def test_a_quota_that_stops_the_threads_is_reported_once_it_takes_a_twentieth_of_the_time(
    tmp_path: Path, membership: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "cgroup"
    _write(root / "pod/container", cpu__max="150000 100000", cpu__stat="usage_usec 5\nthrottled_usec 2000000")
    watch = ThrottleWatch(root, membership)
    begin = time.monotonic()
    try:
        _write(root / "pod/container", cpu__stat="usage_usec 5\nthrottled_usec 2400000")
        assert not watch.look(begin + 10.0)
        _write(root / "pod/container", cpu__stat="usage_usec 5\nthrottled_usec 3000000")
        assert watch.look(begin + 20.0)
    finally:
        watch.close()
    assert "quota of 1 CPUs stopped this process for 0.6 of the last 10 s" in caplog.text


def test_version_one_groups_count_throttled_nanoseconds(tmp_path: Path) -> None:
    membership = tmp_path / "self_cgroup"
    membership.write_text("5:cpu,cpuacct:/job\n")
    _write(tmp_path / "cgroup" / "cpu,cpuacct/job", cpu__stat="nr_throttled 3\nthrottled_time 1500000000")
    assert throttled_s(tmp_path / "cgroup", membership) == 1.5
    assert throttled_s(tmp_path / "other", membership) is None
