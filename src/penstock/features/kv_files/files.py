"""Files of KV cache blocks: one per block and rank, found by the hash of all tokens up to its end.

    FOLDER/kv-1/DIGEST/ab/HASH-GROUP

DIGEST is a fingerprint of all that the bits of a block depend on, so engines with other weights, options, kernels or
ranks have other folders, and a file is never changed. A file is written under another name first, and has a checksum:
after a crash it is whole or it is not used. There are no locks, so several engines and machines may share the folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from penstock.errors import ConfigError, PenstockError
from penstock.observability.units import format_bytes
from penstock.scheduler.block_pool import BlockKey

logger = logging.getLogger(__name__)
LAYOUT = "kv-1"
UNFINISHED = ".part"
# File beside the blocks that says whose they are.
ABOUT = "about.json"
# Age from which on a file that was never finished is removed.
_ABANDONED_S = 3600.0
# Magic number, checksum of the pages, and their size, behind the pages.
_TRAILER = struct.Struct("<8sIQ")
TRAILER_BYTES = _TRAILER.size
_MAGIC = b"PENSTKV2"
# Buffers of one system call, and their alignment where it copies nothing.
_MOST_BUFFERS, _ALIGNMENT = 512, 4096
# Words of 8 bytes that are summed for the checksum.
_SUMMED = 64
# Share of the limit that files keep once some had to make room, and that may be written between two counts.
_KEPT, _BETWEEN_COUNTS = 0.9, 0.05
# Space of the file system that stays free.
_RESERVE_BYTES = 256 << 20


class DamagedBlock(PenstockError):
    """A file whose content is not a block of the expected size."""


def folder_of(root: Path, digest: str) -> Path:
    """Folder of the blocks with this fingerprint."""
    return root / LAYOUT / digest


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """New file, which has its name once it is whole; an exception removes it. Raises OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    unfinished = f"{path}-{secrets.token_hex(8)}{UNFINISHED}"
    try:
        with open(unfinished, "xb") as file:
            yield file
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def write_about(folder: str, about: Mapping[str, Any]) -> None:
    """Say whose blocks a folder has. Raises OSError."""
    path = f"{folder}/{ABOUT}"
    if not os.path.exists(path):
        with whole_file(path) as file:
            file.write(json.dumps(about).encode())


def path_of(folder: str | Path, key: BlockKey) -> str:
    """Path of a block's file."""
    group, digest = key[0], key[1].hex()
    return f"{folder}/{digest[:2]}/{digest}-{group}"


def key_of(path: str) -> BlockKey:
    """The block of a file."""
    digest, _, group = os.path.basename(path).partition("-")
    return int(group), bytes.fromhex(digest)


def write_block(path: str, pages: Sequence[np.ndarray], *, keeps_in_memory: bool = True) -> int:
    """Write a block of these pages, uint8 [page_size_bytes] each; return the bytes. Raises OSError.

    keeps_in_memory: leave a copy in the system's page cache, from which it is read sooner. The copy, and its writing
    back, take several times the CPU time.
    """
    size = sum(page.nbytes for page in pages)
    trailer = _TRAILER.pack(_MAGIC, checksum(pages), size)
    with whole_file(path) as file:
        if keeps_in_memory:
            _write_all(file.fileno(), [page.data for page in pages])
        else:
            _write_directly(file.fileno(), pages)
        _write_all(file.fileno(), [memoryview(trailer)])
    return size


def write_described(
    folder: str, about: Mapping[str, Any], path: str, pages: Sequence[np.ndarray], *, keeps_in_memory: bool = True
) -> int:
    """Write a block as `write_block`, and the description of its folder.

    The folder may be removed meanwhile, such as by `penstock cache rm` or a reset of another engine: it is made anew.
    """
    try:
        write_about(folder, about)
        return write_block(path, pages, keeps_in_memory=keeps_in_memory)
    except FileNotFoundError:
        write_about(folder, about)
        return write_block(path, pages, keeps_in_memory=keeps_in_memory)


def read_block(path: str, pages: Sequence[np.ndarray]) -> int:
    """Read a block into these pages; return the bytes. Its time of change becomes that of its last use.

    Raises OSError, and DamagedBlock for a file that is damaged or of another layout; the pages have any content then.
    """
    size = sum(page.nbytes for page in pages)
    with open(path, "rb", buffering=0) as file:
        trailer = bytearray(TRAILER_BYTES)
        num_read = _read_all(file.fileno(), [*(page.data for page in pages), memoryview(trailer)])
        if os.fstat(file.fileno()).st_size != TRAILER_BYTES + size or num_read != TRAILER_BYTES + size:
            raise DamagedBlock(f"{path} has another size than a block of {size:,} bytes.")
        if _TRAILER.unpack(trailer) != (_MAGIC, checksum(pages), size):
            raise DamagedBlock(f"{path} is damaged.")
        try:
            os.utime(file.fileno())
        except OSError:
            logger.debug("The time of %s cannot be set", path)
    return size


def checksum(pages: Sequence[np.ndarray]) -> int:
    """CRC-32 of the sums, modulo 2^64, of every 512 bytes of all pages.

    A CRC of all bytes would take longer than writing them.
    """
    found = 0
    for page in pages:
        num_summed = page.nbytes - page.nbytes % (8 * _SUMMED)
        words = page[:num_summed].view(np.uint64).reshape(-1, _SUMMED)
        found = zlib.crc32(words.sum(axis=1).data, found)
        found = zlib.crc32(page[num_summed:].data, found)
    return found


def _write_directly(fd: int, pages: Sequence[np.ndarray]) -> None:
    """Write pages to a new file without the system's page cache, where they and the file system allow that."""
    buffers = [page.data for page in pages]
    if not all(page.ctypes.data % _ALIGNMENT == page.nbytes % _ALIGNMENT == 0 for page in pages):
        _write_all(fd, buffers)
        return
    flags, direct = fcntl.fcntl(fd, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | direct)
        _write_all(fd, buffers)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # The file system has no such writes, or asks for another alignment.
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        os.lseek(fd, 0, os.SEEK_SET)
        _write_all(fd, buffers)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _write_all(fd: int, buffers: Sequence[memoryview]) -> None:
    left = list(buffers)
    while left:
        _advance(left, os.writev(fd, left[:_MOST_BUFFERS]))


def _read_all(fd: int, buffers: list[memoryview]) -> int:
    """Read until the buffers are full, or the file ends; return the bytes."""
    total = 0
    while buffers and (num_bytes := os.readv(fd, buffers[:_MOST_BUFFERS])):
        total += num_bytes
        _advance(buffers, num_bytes)
    return total


def _advance(buffers: list[memoryview], num_bytes: int) -> None:
    """Drop the first bytes of these buffers."""
    num_whole = 0
    for buffer in buffers:
        if buffer.nbytes > num_bytes:
            break
        num_bytes -= buffer.nbytes
        num_whole += 1
    del buffers[:num_whole]
    if num_bytes:
        buffers[0] = buffers[0][num_bytes:]


class FolderLimit:
    """Keeps the files of a folder below a number of bytes, whichever engine wrote them, in a thread of its own.

    Removes those that were not used for the longest time, and files that were never finished.

    block_bytes: of the largest block that is kept. note_removed: called, in that thread, with the paths of the files
    that were removed. option: name of the option with the folder, for messages. num_bytes: of all files, as last
    counted, and of those that were noted since.

    Raises ConfigError for a limit that no such block keeps to.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        block_bytes: int = 0,
        note_removed: Callable[[Sequence[str]], None] = lambda _: None,
        option: str = "kv_offload_dir",
    ) -> None:
        if block_bytes and max_bytes * _KEPT < block_bytes + TRAILER_BYTES:
            raise ConfigError(
                f"{option}_size holds {format_bytes(max_bytes)}, and a block of the KV cache takes "
                f"{format_bytes(block_bytes)}. Raise it."
            )
        self._option = option
        self._note_removed = note_removed
        self._root, self._max_bytes = root / LAYOUT, max_bytes
        self.num_bytes = self._num_new_bytes = 0
        self._has_to_count = threading.Event()
        self._is_closed = False
        self._has_to_count.set()
        self._thread = threading.Thread(target=self._run, name="kv-tier-limit", daemon=True)
        self._thread.start()

    def note_written(self, num_bytes: int) -> None:
        """Note bytes that were written to the folder."""
        self.num_bytes += num_bytes
        self._num_new_bytes += num_bytes
        if self._num_new_bytes > self._max_bytes * _BETWEEN_COUNTS:
            self._num_new_bytes = 0
            self._has_to_count.set()

    def why_full(self, num_bytes: int) -> str | None:
        """Return why the file system takes no more bytes, beside a reserve; None if it does."""
        try:
            system = os.statvfs(self._root.parent)
        except FileNotFoundError:
            return None  # it was removed, and is made anew with the next file
        except OSError as error:
            return f"{self._option} cannot be used: {error}"
        is_full = num_bytes + _RESERVE_BYTES > system.f_bavail * system.f_frsize
        return f"the file system of {self._option} is full" if is_full else None

    def close(self) -> None:
        self._is_closed = True
        self._has_to_count.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._has_to_count.wait()
            self._has_to_count.clear()
            if self._is_closed:
                return
            try:
                self.enforce()
            except OSError as error:
                logger.warning("The files of %s could not be counted: %s", self._root, error)

    def enforce(self) -> None:
        """Remove files until the rest has fewer bytes than the limit."""
        files, now = [], time.time()
        for entry in _files_of(self._root):
            try:
                status = entry.stat()
            except OSError:
                continue  # another engine has removed it
            if not entry.name.endswith(UNFINISHED):
                if entry.name != ABOUT:
                    files.append((status.st_mtime, status.st_size, entry.path))
            elif status.st_mtime < now - _ABANDONED_S:
                Path(entry.path).unlink(missing_ok=True)
        self.num_bytes = total = sum(size for _, size, _ in files)
        if total <= self._max_bytes:
            return
        before = total
        files.sort()
        removed = []
        for _, size, path in files:
            if total <= self._max_bytes * _KEPT:
                break
            Path(path).unlink(missing_ok=True)
            removed.append(path)
            total -= size
        self.num_bytes = total
        self._note_removed(removed)
        logger.info("%s had %s, and has %s now", self._root, format_bytes(before), format_bytes(total))


def block_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Entries of the blocks in the folder of a fingerprint."""
    return (one for one in _files_of(folder) if one.name != ABOUT and not one.name.endswith(UNFINISHED))


def remove_folder(folder: Path) -> list[OSError]:
    """Remove the folder of a fingerprint, in which engines may write meanwhile; return why files are not removed."""
    failures: list[OSError] = []

    def note(_: object, __: str, failure: tuple[type[BaseException], BaseException, object]) -> None:
        error = failure[1]
        # Files that are gone, and folders to which one was added, or of which one is not removed.
        if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            failures.append(error)

    shutil.rmtree(folder, onerror=note)
    return failures


def _files_of(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Entries of all files below a folder."""
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except OSError:
        return  # not there yet, or removed
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_of(Path(entry.path))
        else:
            yield entry
