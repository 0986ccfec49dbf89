"""Anonymous shared memory of processes on one machine, freed with the last of them, however they end.

Needs no torch.
"""

from __future__ import annotations

import os
import shutil
import tempfile

from penstock.device.limits import memory_limit
from penstock.errors import OutOfMemory
from penstock.observability.units import format_bytes


def create_shared_memory(num_bytes: int) -> int:
    """Allocate zeroed shared memory; return its descriptor, which the caller closes once every process has it.

    Raises OutOfMemory without enough memory, instead of a kill at the first use.
    """
    folder = None if hasattr(os, "memfd_create") else tempfile.gettempdir()
    try:
        return _create(folder, num_bytes)
    except OSError as error:
        asked = f"{format_bytes(num_bytes)} of shared memory for workers could not be allocated: {error.strerror}."
        if folder is None:
            free = f"{format_bytes(memory_limit().free_bytes)} of memory are free."
            remedy = "Free some, or raise this process's limits of memory, open files and the size of a file (ulimit)."
        else:
            free = f"{format_bytes(shutil.disk_usage(folder).free)} are free in {folder}."
            remedy = "Free some, or set TMPDIR to a folder with more space."
        raise OutOfMemory(f"{asked} {free} {remedy}") from error


def _create(folder: str | None, num_bytes: int) -> int:
    """Allocate in an unlinked file of this folder, or in a memfd."""
    if folder is None:
        descriptor = os.memfd_create("penstock")
    else:
        with tempfile.TemporaryFile(dir=folder) as file:
            descriptor = os.dup(file.fileno())
    try:
        # With `ftruncate` alone, a process that touches a page without memory is killed.
        allocate = getattr(os, "posix_fallocate", None)
        if allocate is None:
            os.ftruncate(descriptor, num_bytes)
        else:
            allocate(descriptor, 0, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
