"""Temporary folders whose remains, after a process that was killed, are removed by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from penstock.system.file_lock import lock_while_open

# A folder without this file is not one of these, or is being made.
_LOCK = ".penstock-lock"


class TemporaryFolder:
    """New folder that is removed with this object, or at the end of the process; also a context manager.

    A lock that ends with the process says that the folder is in use. Making one removes those of this prefix, in the
    same place and of the same user, whose processes have ended.

    prefix: begin of its name. place: folder that has it; None for that of temporary files.
    """

    def __init__(self, prefix: str, place: Path | None = None) -> None:
        _remove_abandoned(prefix, Path(tempfile.gettempdir()) if place is None else place)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        # The file gets its name once it is locked, since another process takes an unlocked one for abandoned.
        unnamed = self.path / f"{_LOCK}.new"
        lock = unnamed.open("xb")
        lock_while_open(lock)
        unnamed.rename(self.path / _LOCK)
        self.close = weakref.finalize(self, _remove, self.path, lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _remove(folder: Path, lock: BinaryIO) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def _remove_abandoned(prefix: str, place: Path) -> None:
    for folder in place.glob(f"{prefix}*"):
        # Files of others, and file systems without locks, are left alone.
        with suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            with (folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
