"""Caching of freed memory by malloc, seen in a child process by its resident size and page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys, threading
import psutil, torch
from penstock.config import DeviceConfig
from penstock.device import create_device

MIB = 1 << 20
device = create_device(DeviceConfig(device="cpu", num_threads=1))

def resident():
    return psutil.Process().memory_info().rss / MIB

def step():
    "What a layer does: three tensors of 24 MiB, and one after another is freed."
    first = torch.ones(6 * MIB)
    second = first + 1
    del first
    third = second + 1
    del second, third

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def run():
    with device.loading_weights():
        step()
        print(*(faults_of_a_step() for _ in range(10)), resident())
    for _ in range(5):
        step()
    print(*(faults_of_a_step() for _ in range(10)), resident())
    weights = torch.ones(6 * MIB)
    with device.loading_weights():
        del weights
    print(resident())

def kept_of_pieces():
    "By the library itself, so that nothing else comes to lie behind the pieces, at the heap's end."
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    before = resident()
    pieces = [ctypes.c_void_p(libc.malloc(24 * MIB)) for _ in range(8)]
    for piece in pieces:
        ctypes.memset(piece, 1, 24 * MIB)
    for piece in pieces:
        libc.free(piece)
    return resident() - before

if sys.argv[1] == "main":
    run()
elif sys.argv[1] in ("loaded", "closed"):
    with device.loading_weights():
        pass
    if sys.argv[1] == "closed":
        device.close()
    print(kept_of_pieces())
else:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
"""


pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries' allocators are left as they are"
)


def printed_by(argument: str) -> list[list[float]]:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument], capture_output=True, text=True, timeout=60, check=True
    )
    return [[float(value) for value in line.split()] for line in result.stdout.splitlines()]


@pytest.mark.parametrize("thread", ["main", "another"])
@pytest.mark.one_case_quick
def test_what_a_step_frees_is_there_for_the_next_and_what_loading_frees_goes_back(thread: str) -> None:
    (*loading, loaded), (*steps, kept), (given_back,) = printed_by(thread)
    assert min(loading) > 2 * 24 * 256
    # Now and then a tensor goes to a part of the heap that none was in before.
    assert sum(steps) < sum(loading) / 5
    assert 24 < kept - loaded < 256
    assert abs(given_back - loaded) < 5


@pytest.mark.slow
def test_a_closed_device_leaves_no_more_kept_than_glibc_would() -> None:
    ((loaded,),), ((closed,),) = printed_by("loaded"), printed_by("closed")
    assert loaded > 180
    assert closed < 70
