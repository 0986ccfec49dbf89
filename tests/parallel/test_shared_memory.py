"""Memory that workers share is had at once and as a whole, or refused with what was asked, what is free, what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.device.anonymous_memory import create_shared_memory
from penstock.parallel.shared_memory import SharedMemory
from support.leftovers import descriptors

# Where it has no name in any case, it may be limited by that of files; a file without a name, by its file system.
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
"""
IN_A_FILE = """
import os
del os.memfd_create
"""
PROGRAM = """
from pathlib import Path
from penstock.errors import OutOfMemory
from penstock.device.anonymous_memory import create_shared_memory
from penstock.parallel.shared_memory import SharedMemory

before = len(list(Path("/proc/self/fd").iterdir()))
try:
    create_shared_memory(1 << 20)
except OutOfMemory as error:
    print(error)
assert len(list(Path("/proc/self/fd").iterdir())) == before
# What there is room for is there.
memory = SharedMemory(create_shared_memory(32768))
memory._bytes.fill_(7)
print("sum", int(memory._bytes.sum()))
"""
ENGINE = """
from penstock.config import EngineConfig
from penstock.executor import create_executor

if __name__ == "__main__":
    create_executor(EngineConfig.create("demo", tensor_parallel_size=2, device="cpu", num_threads=2))
"""


def run(program: str, *, tmpdir: Path | None = None) -> subprocess.CompletedProcess[str]:
    """With a file system of 64 KiB for temporary files, if one is named, private to the process."""
    command = [sys.executable, "-c", program]
    environment = dict(os.environ)
    if tmpdir is not None:
        mount = f'mount -t tmpfs -o size=64k tmpfs "{tmpdir}" && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", mount, "sh", *command]
        environment["TMPDIR"] = str(tmpdir)
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)


def can_mount(folder: Path) -> bool:
    return run("pass", tmpdir=folder).returncode == 0


def test_it_is_there_from_the_first_byte_to_the_last() -> None:
    before = descriptors()
    descriptor = create_shared_memory(300_000)
    assert os.fstat(descriptor).st_blocks * 512 >= 300_000
    memory = SharedMemory(descriptor)
    assert memory.num_bytes == 300_000
    assert int(memory._bytes.sum()) == 0
    del memory
    os.close(descriptor)
    assert descriptors() == before


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memory without a name")
@pytest.mark.slow
def test_memory_that_cannot_be_had_is_refused_with_the_amounts_and_a_way_out() -> None:
    result = run(LIMITED + PROGRAM)
    assert (result.returncode, result.stderr) == (0, "")
    message, rest = result.stdout.splitlines()
    assert message.startswith("1.00 MiB of shared memory for workers could not be allocated: File too large. ")
    assert "of memory are free. Free some, or raise this process's limits" in message
    assert rest == f"sum {7 * 32768}"


def test_a_full_file_system_is_refused_before_anybody_is_killed(tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip("file systems cannot be mounted here")
    result = run(IN_A_FILE + PROGRAM, tmpdir=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    message, rest = result.stdout.splitlines()
    assert message.startswith("1.00 MiB of shared memory for workers could not be allocated: No space left on device. ")
    assert f"64.00 KiB are free in {tmp_path}. Free some, or set TMPDIR to a folder with more space." in message
    assert rest == f"sum {7 * 32768}"


@pytest.mark.slow
def test_an_engine_without_room_for_it_does_not_start_and_says_so() -> None:
    result = run(LIMITED + ENGINE)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "MiB of shared memory for workers could not be allocated: File too large." in last
    assert "OutOfMemory" in last
