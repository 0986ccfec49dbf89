"""Anonymous shared memory of processes on one machine, freed with the last of them, however they end."""

from __future__ import annotations

import mmap
import os

import torch


class SharedMemory:
    """Bytes behind a file descriptor without a name, so that no file system ever holds a file of them.

    descriptor: to pass on to other processes. address: of the first byte.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.num_bytes = os.fstat(descriptor).st_size
        # The tensor owns the mapping.
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, self.num_bytes), dtype=torch.uint8)
        self.address = self._bytes.data_ptr()
