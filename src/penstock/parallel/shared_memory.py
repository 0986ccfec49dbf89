"""Memory that several processes of one machine have, and that is gone with the last of them, however they end."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch


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
    """The descriptor of so many zeros, which the caller closes once every process has it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("penstock")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor
