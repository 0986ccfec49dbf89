"""Store of responses: a file per response, in a folder that all front ends of a server share."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError
from penstock.server.options import ServerOptions
from penstock.system.file_lock import is_locked, lock_while_open, locked_folder
from penstock.system.temporary_folder import TemporaryFolder

_ID = re.compile(r"resp_[0-9a-f]{32}")
# Files of the store: responses, those that are being written, and locks of those that run. A folder may have others,
# which are left alone.
_FILE = re.compile(r"resp_[0-9a-f]{32}\.json")
_PART = re.compile(r"resp_.*\.(?:part|lock)")
# Age of files that are written no more, since their front end was killed.
_ABANDONED_S = 3600.0


class StoredResponse(msgspec.Struct):
    """A response and its conversation. body: of the response. items: its input, with all of the conversation before."""

    body: dict[str, Any]
    items: list[dict[str, Any]]

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Items that a next response goes on with."""
        return [*self.items, *self.body["output"]]


class ResponseStore:
    """Responses by id, at most as many and as large as the options allow; those unused for longest are dropped.

    The folder is `response_store_dir`, or else one that is deleted with the store. A response that alone exceeds the
    limit is not kept. Its methods read and write files, for which an event loop should not wait.

    Raises ConfigError for a folder that cannot be made.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._max_responses = options.max_stored_responses
        self._max_bytes = options.max_stored_response_bytes
        if options.response_store_dir is None:
            self._temporary = TemporaryFolder("penstock-responses-")
            self._folder = self._temporary.path
            return
        self._folder = Path(options.response_store_dir)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"response_store_dir={str(self._folder)!r} cannot be made: {error}.") from error

    @property
    def keeps_responses(self) -> bool:
        return self._max_responses > 0

    def put(self, stored: StoredResponse) -> None:
        """Write a response, and drop others where there are too many."""
        if not self.keeps_responses:
            return
        # Readers see whole files only.
        descriptor, path = tempfile.mkstemp(".part", "resp_", self._folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(stored))
            Path(path).replace(self._path(stored.body["id"]))
        except BaseException:
            Path(path).unlink(missing_ok=True)
            raise
        self._drop_oldest()

    def end(self, stored: StoredResponse) -> StoredResponse | None:
        """Write how a response in progress has ended. One that was deleted or has ended meanwhile stays as it is.

        Returns what is stored then, None for nothing.
        """
        with locked_folder(self._folder):
            now = self.get(stored.body["id"])
            if now is None or now.body["status"] != "in_progress":
                return now
            self.put(stored)
        return stored

    def get(self, id: str) -> StoredResponse | None:
        """The response, which now counts as used; None if it is not stored."""
        if _ID.fullmatch(id) is None:
            return None
        path = self._path(id)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        for used in (path, self._lock(id)):
            with suppress(FileNotFoundError):
                os.utime(used)
        return msgspec.json.decode(data, type=StoredResponse)

    @contextmanager
    def running(self, id: str) -> Iterator[None]:
        """Lock a response that runs."""
        path = self._lock(id)
        with path.open("xb") as file:
            lock_while_open(file)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def is_running(self, id: str) -> bool:
        """Whether a front end runs the response."""
        try:
            return is_locked(self._lock(id))
        except FileNotFoundError:
            return False

    def delete(self, id: str) -> bool:
        """Delete a response. Returns whether it was stored."""
        if _ID.fullmatch(id) is None:
            return False
        with locked_folder(self._folder):
            try:
                self._path(id).unlink()
            except FileNotFoundError:
                return False
        return True

    def _drop_oldest(self) -> None:
        """Delete files, those unused for longest first, until the limits are kept. Other front ends may do the same."""
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _PART.fullmatch(entry.name):
                    _drop_abandoned(entry)
                elif _FILE.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        if status.st_size > self._max_bytes:
                            Path(entry.path).unlink()
                        else:
                            files.append((status.st_mtime_ns, status.st_size, entry.path))
        num_bytes = 0
        for number, (_, size, path) in enumerate(sorted(files, reverse=True), start=1):
            num_bytes += size
            if number > self._max_responses or num_bytes > self._max_bytes:
                Path(path).unlink(missing_ok=True)

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.json"

    def _lock(self, id: str) -> Path:
        return self._folder / f"{id}.lock"


def _drop_abandoned(entry: os.DirEntry[str]) -> None:
    with suppress(FileNotFoundError):
        if entry.stat().st_mtime < time.time() - _ABANDONED_S:
            Path(entry.path).unlink()
