"""Memory that several processes of one machine have, and that is gone with the last of them, however they end."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile

import torch

from penstock.device.limits import memory_limit
from penstock.errors import OutOfMemory
from penstock.observability.units import format_bytes


class SharedMemory:
    """Bytes behind a file descriptor without a name: nothing is left in any file system, not even for a moment.

    descriptor: for a process that is to have the memory too. address: of the first byte.
    """

    def __init__(self, descriptor: int) -> None:
        """Of a descriptor that another process has made and passed on."""
        self.descriptor = descriptor
        self.num_bytes = os.fstat(descriptor).st_size
        # The tensor keeps the mapping, which ends with it.
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, self.num_bytes), dtype=torch.uint8)
        self.address = self._bytes.data_ptr()


def create_shared_memory(num_bytes: int) -> int:
    """The descriptor of so many zeros, which the caller closes once every process has it.

    Raises OutOfMemory where there is no room for them, before anybody would find out by being killed.
    """
    folder = None if hasattr(os, "memfd_create") else tempfile.gettempdir()
    try:
        return _create(folder, num_bytes)
    except OSError as error:
        asked = f"{format_bytes(num_bytes)} of memory that workers share could not be had: {error.strerror}."
        if folder is None:
            free = f"{format_bytes(memory_limit().free_bytes)} of memory are free."
            remedy = "Free some, or raise this process's limits of memory, open files and the size of a file (ulimit)."
        else:
            free = f"{format_bytes(shutil.disk_usage(folder).free)} are free in {folder}."
            remedy = "Free some, or let TMPDIR name a folder with more room."
        raise OutOfMemory(f"{asked} {free} {remedy}") from error


def _create(folder: str | None, num_bytes: int) -> int:
    """In a file of this folder that has no name, or in memory alone."""
    if folder is None:
        descriptor = os.memfd_create("penstock")
    else:
        with tempfile.TemporaryFile(dir=folder) as file:
            descriptor = os.dup(file.fileno())
    try:
        # A size alone is a promise: whoever touches a page for which there is no room then is killed.
        allocate = getattr(os, "posix_fallocate", None)
        if allocate is None:
            os.ftruncate(descriptor, num_bytes)
        else:
            allocate(descriptor, 0, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
