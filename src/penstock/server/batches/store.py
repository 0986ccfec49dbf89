"""Store of files and batches: a folder that all front ends of a server share, and the next server finds again.

A file has its content, and a description beside it. A batch has a description, its answers so far (`.output`,
`.errors`), a lock that the front end holds which runs it, and a mark (`.cancel`) once it is to be cancelled.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from penstock.errors import ConfigError, InvalidRequest
from penstock.server.batches.lines import LineChecks, expired_line
from penstock.server.http.errors import ApiError
from penstock.server.options import ServerOptions
from penstock.system.file_lock import try_lock

# Kinds of answers' files: those of requests that succeeded, and the others.
KINDS = ("output", "errors")
UNFINISHED = ("validating", "in_progress", "finalizing")
FINAL = ("completed", "failed", "expired", "cancelled")
_FILE = re.compile(r"file-[0-9a-f]{32}(?:_output|_errors)?")
_BATCH = re.compile(r"batch_[0-9a-f]{32}")
# Descriptions of ended batches that are kept, the newest ones.
_MOST_ENDED = 1000
# Broken lines that a failed batch names.
_MOST_ERRORS = 100


class BatchStore:
    """Files and batches in `batch_dir`. Its methods read and write files, for which an event loop should not wait.

    Raises ConfigError for a folder that cannot be made.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._folder = None if options.batch_dir is None else Path(options.batch_dir)
        self._ended = set[str]()
        if self._folder is None:
            return
        try:
            for name in ("files", "batches"):
                (self._folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"batch_dir={str(self._folder)!r} cannot be made: {error}.") from error

    @property
    def is_enabled(self) -> bool:
        return self._folder is not None

    @property
    def folder(self) -> Path:
        """Folder of the store. Raises ApiError without one."""
        if self._folder is None:
            raise ApiError(400, "Files and batches need a folder. Start the server with --batch-dir FOLDER.")
        return self._folder

    def add_file(self, source: BinaryIO, size: int, filename: str) -> dict[str, Any]:
        """Store a file of this size. Returns its description. Raises ApiError if there is no room."""
        num_bytes = self._num_bytes() + size
        limit = self._options.max_batch_dir_bytes
        if num_bytes > limit:
            message = (
                f"The files and answers would have {num_bytes:,} bytes. Allowed: {limit:,} (max_batch_dir_bytes). "
                "Delete files (DELETE /v1/files/ID)."
            )
            raise ApiError(413, message, param="file", code="storage_full")
        id = f"file-{uuid.uuid4().hex}"
        with self._content(id).open("wb") as file:
            shutil.copyfileobj(source, file)
        return self._describe(id, filename, "batch")

    def file(self, id: str) -> dict[str, Any]:
        """Description of a file. Raises ApiError for one that is not stored."""
        if _FILE.fullmatch(id) is None or not (path := self._content(id).with_suffix(".json")).is_file():
            raise ApiError(404, f"The file {id!r} is not stored.", code="file_not_found")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])

    def content(self, id: str) -> Path:
        """Path of a file's content. Raises ApiError as `file`."""
        self.file(id)
        return self._content(id)

    def delete_file(self, id: str) -> None:
        """Delete a file. Raises ApiError as `file`."""
        self.content(id).unlink(missing_ok=True)
        self._content(id).with_suffix(".json").unlink(missing_ok=True)

    def files(self) -> list[dict[str, Any]]:
        """Descriptions of all files, the newest first."""
        return _newest_first(self.folder / "files")

    def batch(self, id: str) -> dict[str, Any]:
        """Description of a batch. Raises ApiError for one that is not stored."""
        if _BATCH.fullmatch(id) is None or not (path := self._of_batch(id, "json")).is_file():
            raise ApiError(404, f"The batch {id!r} is not stored.", code="batch_not_found")
        batch = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if batch["status"] in UNFINISHED and self.is_to_be_cancelled(id):
            batch["status"] = "cancelling"
        return batch

    def batches(self) -> list[dict[str, Any]]:
        """Descriptions of all batches, the newest first."""
        found = []
        for one in _newest_first(self.folder / "batches"):
            with suppress(ApiError):  # dropped meanwhile
                found.append(self.batch(one["id"]))
        return found

    def unfinished(self) -> list[str]:
        """Ids of the batches that have not ended, the oldest first. Those that have are read once."""
        if self._folder is None:
            return []
        found = _newest_first(self.folder / "batches", self._ended)
        self._ended.update(one["id"] for one in found if one["status"] in FINAL)
        return [one["id"] for one in reversed(found) if one["status"] in UNFINISHED]

    def save(self, batch: dict[str, Any]) -> None:
        """Write the description of a batch, of which readers see whole ones only. A new one waits for a front end."""
        _write(self._of_batch(batch["id"], "json"), msgspec.json.encode(batch))

    @contextmanager
    def claimed(self, id: str) -> Iterator[dict[str, Any] | None]:
        """The batch, as long as no other front end runs it; None if one does, or it has ended."""
        with self._of_batch(id, "lock").open("ab") as file:
            if not try_lock(file):
                yield None
                return
            stored = msgspec.json.decode(self._of_batch(id, "json").read_bytes(), type=dict[str, Any])
            yield stored if stored["status"] in UNFINISHED else None

    def cancel(self, id: str) -> None:
        """Have a batch cancelled by the front end that runs it, or the next one."""
        self._of_batch(id, "cancel").touch()

    def is_to_be_cancelled(self, id: str) -> bool:
        return self._of_batch(id, "cancel").exists()

    def requests(self, batch: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Requests of a batch, and errors of its lines, as the batch's `errors` have them."""
        requests: list[dict[str, Any]] = []
        errors: list[dict[str, Any]] = []
        checks = LineChecks((batch["endpoint"],))
        try:
            data = self.content(batch["input_file_id"]).read_bytes()
        except (ApiError, FileNotFoundError):
            return [], [batch_error(None, f"The file {batch['input_file_id']!r} was deleted.")]
        for number, line in enumerate(data.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                fields = msgspec.json.decode(line, type=dict[str, Any])
                checks.check(f"line {number}", fields)
                if fields["body"].get("stream"):
                    raise InvalidRequest("stream=true is not available. Allowed: false.")
                requests.append(fields)
            except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequest) as error:
                errors.append(batch_error(number, str(error)))
            if len(requests) > (most := self._options.max_batch_requests):
                message = f"The file has more than {most:,} requests (max_batch_requests). Send it in parts."
                return [], [batch_error(number, message)]
            if len(errors) == _MOST_ERRORS:
                break
        if not requests and not errors:
            errors = [batch_error(None, "The file has no requests.")]
        return requests, errors

    def answered(self, id: str) -> dict[str, set[str]]:
        """Names of the requests that have an answer, by kind. Lines that a crash or a full disk cut off are dropped."""
        found: dict[str, set[str]] = {}
        for kind in KINDS:
            path, names = self._of_batch(id, kind), set[str]()
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            whole = []
            for line in lines:
                with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    if line.endswith(b"\n"):
                        names.add(msgspec.json.decode(line)["custom_id"])
                        whole.append(line)
            if len(whole) < len(lines):
                _write(path, b"".join(whole))
            found[kind] = names
        return found

    def add_answer(self, id: str, kind: str, line: dict[str, Any]) -> None:
        """Append an answer to those of a batch."""
        with self._of_batch(id, kind).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def add_expired(self, batch: dict[str, Any], requests: list[dict[str, Any]]) -> None:
        """Append an error for each request without an answer."""
        names = set[str]().union(*self.answered(batch["id"]).values())
        for request in requests:
            if (name := request["custom_id"]) not in names:
                line = expired_line(uuid.uuid4().hex, name, batch["completion_window"])
                self.add_answer(batch["id"], "errors", line)
                batch["request_counts"]["failed"] += 1

    def fail(self, batch: dict[str, Any], errors: list[dict[str, Any]]) -> None:
        """End a batch with these errors."""
        batch["errors"] = {"object": "list", "data": errors}
        self.finish(batch, "failed")

    def finish(self, batch: dict[str, Any], status: str) -> None:
        """End a batch with this status: its answers become files."""
        id = batch["id"]
        for kind, field in zip(KINDS, ("output_file_id", "error_file_id"), strict=True):
            path, file_id = self._of_batch(id, kind), f"file-{id.removeprefix('batch_')}_{kind}"
            if path.exists():
                path.replace(self._content(file_id))
                self._describe(file_id, f"{id}_{kind}.jsonl", "batch_output")
            if self._content(file_id).exists():
                batch[field] = file_id
        batch |= {"status": status, f"{status}_at": int(time.time())}
        self.save(batch)
        for ending in ("cancel", "lock"):
            self._of_batch(id, ending).unlink(missing_ok=True)
        ended = [one["id"] for one in _newest_first(self.folder / "batches") if one["status"] in FINAL]
        for old in ended[_MOST_ENDED:]:
            self._of_batch(old, "json").unlink(missing_ok=True)
            self._ended.discard(old)

    def _num_bytes(self) -> int:
        """Size of all files, and of the answers so far."""
        num_bytes = 0
        for path in self.folder.glob("*/*"):
            # A file may be deleted meanwhile.
            with suppress(FileNotFoundError):
                num_bytes += path.stat().st_size
        return num_bytes

    def _describe(self, id: str, filename: str, purpose: str) -> dict[str, Any]:
        path = self._content(id)
        described = {
            "id": id,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        _write(path.with_suffix(".json"), msgspec.json.encode(described))
        return described

    def _content(self, id: str) -> Path:
        return self.folder / "files" / f"{id}.data"

    def _of_batch(self, id: str, ending: str) -> Path:
        return self.folder / "batches" / f"{id}.{ending}"


def _write(path: Path, data: bytes) -> None:
    descriptor, part = tempfile.mkstemp(".part", path.name, path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    Path(part).replace(path)


def _newest_first(folder: Path, without: Collection[str] = ()) -> list[dict[str, Any]]:
    """Descriptions in a folder, but for those of these ids."""
    found: list[dict[str, Any]] = []
    for path in folder.glob("*.json"):
        if path.stem in without:
            continue
        # A file may be deleted meanwhile.
        with suppress(FileNotFoundError):
            found.append(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    return sorted(found, key=lambda one: (-one["created_at"], one["id"]))


def batch_error(number: int | None, message: str) -> dict[str, Any]:
    """Entry of a batch's `errors`. number: of the line."""
    return {"code": "invalid_request", "line": number, "message": message, "param": None}
