"""Copies of tensors' content outside of the device's memory, to which it returns."""

from __future__ import annotations

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.device.host_memory import bytes_at, ranges_of
from penstock.errors import OutOfMemory
from penstock.observability.units import format_bytes

# Linux reads and writes at most this at once.
_MOST_BYTES = 1 << 30


class Backup(ABC):
    """Content of tensors at the time of its making. num_bytes: of it."""

    num_bytes: int

    @abstractmethod
    def restore(self) -> None:
        """Write the content back into the tensors. Raises OSError where it cannot be read."""

    @abstractmethod
    def close(self) -> None:
        """Drop the content; idempotent."""


class FileBackup(Backup):
    """Content in a file without a name, so that it ends with its process, however that ends.

    folder: place of the file. Raises OutOfMemory where the folder has no room for it, or takes no file.
    """

    def __init__(self, tensors: Sequence[Tensor], folder: Path) -> None:
        # They own the memory.
        self._tensors = tensors
        self._ranges = ranges_of(tensors)
        self.num_bytes = sum(map(len, self._ranges))
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed by `close`
            try:
                self._write()
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise OutOfMemory(
                f"The weights need {format_bytes(self.num_bytes)} in {folder} while the engine sleeps, which could not "
                f"be written there: {error.strerror}.{_free_space(folder)} Free some, or set sleep_dir to a folder "
                "with more space."
            ) from error

    def restore(self) -> None:
        offset = 0
        for one in self._ranges:
            memory = bytes_at(one)
            for begin in range(0, len(memory), _MOST_BYTES):
                part = memory[begin : begin + _MOST_BYTES]
                _read_whole(self._file.fileno(), part, offset + begin)
            offset += len(memory)

    def close(self) -> None:
        self._file.close()
        self._tensors = ()

    def _write(self) -> None:
        descriptor = self._file.fileno()
        if self.num_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, self.num_bytes)
        offset = 0
        for one in self._ranges:
            memory = bytes_at(one)
            done = 0
            while done < len(memory):
                done += os.pwrite(descriptor, memory[done : done + _MOST_BYTES], offset + done)
            offset += done


class HostBackup(Backup):
    """Content of a GPU's tensors in pinned memory of the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors: Sequence[Tensor] = tensors
        self._copies = [_on_host(tensor) for tensor in tensors]
        self.num_bytes = sum(copy.nbytes for copy in self._copies)

    def restore(self) -> None:
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy, non_blocking=True)
        if self._tensors:
            torch.cuda.synchronize(self._tensors[0].device)

    def close(self) -> None:
        self._tensors = self._copies = []


def _on_host(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor)


def _read_whole(descriptor: int, memory: memoryview, offset: int) -> None:
    """Read bytes of a file into memory. Raises OSError at its end."""
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if count == 0:
            raise OSError(f"the file ends {format_bytes(len(memory) - done)} too early")
        done += count


def _free_space(folder: Path) -> str:
    try:
        return f" {format_bytes(shutil.disk_usage(folder).free)} are free there."
    except OSError:
        return ""
