"""Number and placement of threads, on machines as described under /sys."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.device.limits import cpu_quota, memory_nodes, parse_cpu_list, physical_cores, usable_cpus
from penstock.device.threads import plan_threads


def make_machine(root: Path, cores: list[str], nodes: list[str], name: str = "core_cpus_list") -> Path:
    """cores, nodes: their logical CPUs, as the kernel lists them."""
    for core in cores:
        for cpu in parse_cpu_list(core):
            folder = root / "cpu" / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            (folder / name).write_text(f"{core}\n")
    for number, node in enumerate(nodes):
        (root / "node" / f"node{number}").mkdir(parents=True)
        (root / "node" / f"node{number}" / "cpulist").write_text(f"{node}\n")
    return root


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    """Four cores of two hardware threads, one node."""
    return make_machine(tmp_path, ["0,4", "1,5", "2,6", "3,7"], ["0-7"])


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """Two nodes of four cores of two hardware threads."""
    cores = [f"{first},{first + 8}" for first in range(8)]
    return make_machine(tmp_path, cores, ["0-3,8-11", "4-7,12-15"], name="thread_siblings_list")


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus_are_read_as_the_kernel_writes_them(cpus: set[int]) -> None:
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    assert parse_cpu_list(text + "\n") == cpus


def test_hardware_threads_of_a_core_count_once(laptop: Path) -> None:
    assert len(physical_cores(range(8), laptop)) == 4
    assert physical_cores([0, 4, 5], laptop) == [{0, 4}, {5}]
    plan = plan_threads(None, cpus=frozenset(range(8)), devices=laptop)
    assert (plan.num_threads, plan.cpus) == (4, None)


def test_affinity_and_quota_are_kept(laptop: Path) -> None:
    assert plan_threads(None, cpus=frozenset({1, 5, 6}), devices=laptop).num_threads == 2
    plan = plan_threads(None, cpus=frozenset(range(8)), quota=3, devices=laptop)
    assert plan.num_threads == 3
    assert "quota" in plan.reason
    assert plan_threads(None, cpus=frozenset({1}), quota=3, devices=laptop).num_threads == 1


def test_a_number_that_is_asked_for_is_taken(laptop: Path) -> None:
    assert plan_threads(7, cpus=frozenset({1}), quota=1, devices=laptop).num_threads == 7


def test_of_several_nodes_one_is_kept_to(server: Path) -> None:
    plan = plan_threads(None, cpus=frozenset(range(16)), devices=server)
    assert (plan.num_threads, plan.cpus) == (4, frozenset({0, 1, 2, 3, 8, 9, 10, 11}))
    assert "node 0, one of 2" in plan.reason


def test_the_node_with_the_most_usable_cores_is_taken(server: Path) -> None:
    cpus = frozenset({0, 8, 5, 6, 14})
    assert memory_nodes(cpus, server) == {0: {0, 8}, 1: {5, 6, 14}}
    plan = plan_threads(None, cpus=cpus, devices=server)
    assert (plan.num_threads, plan.cpus) == (2, frozenset({5, 6, 14}))
    assert plan_threads(None, cpus=frozenset({4, 5}), devices=server).cpus is None


def test_more_threads_than_a_node_has_cores_are_not_kept_to_it(server: Path) -> None:
    cpus = frozenset(range(16))
    assert plan_threads(4, cpus=cpus, devices=server).cpus is not None
    assert plan_threads(5, cpus=cpus, devices=server).cpus is None


@pytest.mark.parametrize(
    ("num_ranks", "options", "num_threads", "cpus"),
    [
        (2, {}, 4, [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]),
        (4, {}, 2, [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]),
        (4, {"quota": 4}, 1, [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]),
        (2, {"requested": 3}, 1, [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]),
        (2, {"requested": 10}, 5, [None, None]),
        (16, {}, 1, [None] * 16),
    ],
)
def test_ranks_share_threads_and_have_cores_of_their_own(
    num_ranks: int, options: dict[str, int], num_threads: int, cpus: list[set[int] | None], server: Path
) -> None:
    asked = {"requested": None, **options}
    plans = [
        plan_threads(**asked, cpus=frozenset(range(16)), devices=server, rank=rank, num_ranks=num_ranks)  # type: ignore[arg-type]
        for rank in range(num_ranks)
    ]
    assert [plan.cpus for plan in plans] == cpus
    assert {plan.num_threads for plan in plans} == {num_threads}


def test_without_a_description_every_cpu_is_a_core(tmp_path: Path) -> None:
    plan = plan_threads(None, cpus=frozenset({0, 1, 2}), devices=tmp_path)
    assert (plan.num_threads, plan.cpus) == (3, None)


def test_this_machine_is_understood() -> None:
    plan = plan_threads(None, quota=cpu_quota())
    assert 1 <= plan.num_threads <= len(usable_cpus())


IN_A_PROCESS = """
import os, sys
os.sched_setaffinity(0, {int(cpu) for cpu in sys.argv[1].split(",")})
import torch
from penstock.config import DeviceConfig
from penstock.device import create_device
from penstock.kernels.native import NATIVE
device = create_device(DeviceConfig(device="cpu", num_threads=int(sys.argv[2]) or None))
def tasks():
    return len(os.listdir("/proc/self/task"))
x, weight = torch.randn(600, 600), torch.randn(600, 600)
torch.softmax(x, -1)
of_torch = tasks()
if NATIVE is not None:
    NATIVE.linear(x, NATIVE.pack_weight(weight), 600, None)
print(device.num_threads, torch.get_num_threads(), tasks() - of_torch)
"""


BOUND = """
import os, sys, threading
from penstock.device.threads import Binding

cpus = frozenset(os.sched_getaffinity(0))
one = frozenset([min(cpus)])
other = frozenset([max(cpus)])
binding = Binding()
wakes, tasks = threading.Event(), {}

def start(name):
    thread = threading.Thread(target=wakes.wait)
    thread.start()
    tasks[name] = thread.native_id

start("before")
binding.bind("first", one)
binding.bind("second", None)
start("kept")
start("moved by its owner")
os.sched_setaffinity(tasks["moved by its owner"], other)
assert os.sched_getaffinity(tasks["kept"]) == os.sched_getaffinity(0) == one
binding.release("first")
binding.release("first")
assert os.sched_getaffinity(tasks["kept"]) == os.sched_getaffinity(0) == one
binding.release("second")
print(*(os.sched_getaffinity(task) == cpus for task in (0, tasks["before"], tasks["kept"])))
print(os.sched_getaffinity(tasks["moved by its owner"]) == other)
wakes.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sets the affinity as Linux does")
@pytest.mark.skipif(len(usable_cpus()) < 2, reason="a single CPU leaves nothing to choose")
def test_threads_are_kept_to_cpus_until_the_last_device_is_closed() -> None:
    printed = subprocess.run([sys.executable, "-c", BOUND], check=True, capture_output=True, text=True).stdout
    assert printed.split() == ["True"] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="sets the affinity as Linux does")
@pytest.mark.parametrize(("threads", "expected"), [(0, 1), (2, 2)])
def test_a_process_keeps_to_its_affinity_and_makes_no_threads_beside_torchs(threads: int, expected: int) -> None:
    cpu = str(min(os.sched_getaffinity(0)))
    command = [sys.executable, "-c", IN_A_PROCESS, cpu, str(threads)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.split() == [str(expected), str(expected), "0"]
