"""Folder through which the processes of one server share their metrics: a file each."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

logger = logging.getLogger(__name__)
# Begin of the names of front ends' files, which their numbers end.
FRONT_END = "front-end-"
_T = TypeVar("_T")


class SharedFile:
    """File that one process writes and others read whole, at any time."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.json"
        self._written = folder / f"{name}.writing"
        self._has_failed = False

    def write(self, value: msgspec.Struct) -> None:
        """Replace the file; an error is logged once in a row."""
        try:
            self._written.write_bytes(msgspec.json.encode(value))
            os.replace(self._written, self.path)
        except OSError as error:
            if not self._has_failed:
                logger.warning("Metrics cannot be shared with other front ends: %s", error)
            self._has_failed = True
        else:
            self._has_failed = False

    def read(self, kind: type[_T]) -> _T | None:
        """Content of the file; None if there is none."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=kind)
        except OSError:
            return None


def shared_files(folder: Path, prefix: str) -> Iterator[SharedFile]:
    """Files whose names begin with `prefix`."""
    return (SharedFile(folder, path.stem) for path in sorted(folder.glob(f"{prefix}*.json")))
