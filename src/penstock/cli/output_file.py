"""Output file of a command, which is renamed once it is complete."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import BinaryIO

from penstock.cli.failures import file_named
from penstock.errors import ConfigError
from penstock.system.file_lock import is_locked, lock_while_open

# Names of open files, which may be regular files that must not be replaced.
_OPEN_FILES = ("/dev/fd/", "/proc/")


class PartialFile:
    """File of results in the order of completion, each flushed at once.

    `finish` puts them into the order of the requests.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.path = Path(file.name)
        self._file = file
        self._places: dict[int, tuple[int, int]] = {}
        self._end = 0

    def put(self, index: int, text: str) -> None:
        """Write the lines of request number `index`."""
        data = text.encode()
        self._file.write(data)
        self._file.flush()
        self._places[index] = (self._end, len(data))
        self._end += len(data)

    def put_bytes(self, data: bytes) -> None:
        """Write the whole content, which has no lines."""
        self._file.write(data)
        self._file.flush()
        self._places[0] = (0, len(data))

    def put_rest(self) -> None:
        """Do nothing: no result waits for another."""

    def sync(self) -> None:
        """Flush to the disk (fsync)."""
        os.fsync(self._file.fileno())

    def finish(self, target: Path) -> None:
        """Replace `target` with the results in the order of the requests."""
        offsets = [self._places[index] for index in sorted(self._places)]
        if offsets == sorted(offsets):
            _replace(self.path, target)
            return
        with self.path.open("rb") as source, _new_file_beside(target) as ordered:
            try:
                for offset, length in offsets:
                    source.seek(offset)
                    ordered.write(source.read(length))
                ordered.close()
                _replace(Path(ordered.name), target)
            except BaseException:
                Path(ordered.name).unlink(missing_ok=True)
                raise
        self.path.unlink()


def refuse_same_file(input: Path, output: Path, *, is_standard_input: bool, flag: str = "--input") -> None:
    """Raise ConfigError if `output` and the input are the same file, by any name. flag: of the input, in the error."""
    try:
        source = os.fstat(0) if is_standard_input else input.stat()
        target = output.stat()
    except OSError:
        return
    if stat.S_ISREG(source.st_mode) and os.path.samestat(source, target):
        raise ConfigError(
            f"--output {output} is the file of {flag} {input}. Give another one, which becomes the output."
        )


def partial_files(path: Path) -> list[Path]:
    """Partial files of earlier runs for `path`, without those of running processes."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        return []
    return [found for found in _partial_names(target) if found.is_file() and not is_locked(found)]


@contextmanager
def output_file(path: Path, *, only_partial: bool = False) -> Iterator[PartialFile | BinaryIO]:
    """Open the output file for `path`.

    It is named `.partial` until it is complete, so that an earlier file stays if the command is interrupted, and the
    results so far are kept; a message names them. Symbolic links stay links. Pipes, devices, open files, and files in
    folders without write permission are written in place, in the order of the calls.

    Raises ConfigError if it cannot be opened, and with `only_partial` if it would be written in place.
    """
    target = Path(os.path.realpath(path))
    with file_named("--output", path):
        partial = _open_partial(path, target)
        if partial is None and only_partial:
            raise ConfigError(f"--resume is not possible for --output {path}, which is written in place. Leave it out.")
        file = partial or path.open("wb")
    if partial is None:
        with file:
            yield file
        return
    try:
        with file:
            written = PartialFile(file)
            yield written
        written.finish(target)
    except BaseException:
        _keep(Path(file.name), path)
        raise


def _open_partial(path: Path, target: Path) -> BinaryIO | None:
    """Create a file beside the target; None if the target must be written in place."""
    if path.exists():
        if not path.is_file() or _is_open(path):
            return None
        # Fails for a file without write permission.
        target.open("a").close()
    try:
        return _new_file_beside(target)
    except PermissionError:
        if path.exists():
            return None
        raise


def _new_file_beside(target: Path) -> BinaryIO:
    """Create a partial file, locked while it is open, if the file system has locks."""
    for number in count(1):
        try:
            file = _partial_name(target, number).open("xb")
        except FileExistsError:
            continue
        lock_while_open(file)
        return file
    raise AssertionError("there is always another number")


def _partial_name(target: Path, number: int) -> Path:
    return target.with_name(f"{target.name}.partial{number if number > 1 else ''}")


def _partial_names(target: Path) -> Sequence[Path]:
    """Existing partial files of the target, by number."""
    prefix = f"{target.name}.partial"
    endings = [name.removeprefix(prefix) for name in os.listdir(target.parent) if name.startswith(prefix)]
    numbers = sorted(int(ending or 1) for ending in endings if not ending or ending.isdecimal())
    return [_partial_name(target, number) for number in numbers]


def _is_open(path: Path) -> bool:
    if os.path.abspath(path).startswith(_OPEN_FILES):
        return True
    return any(os.path.samestat(path.stat(), os.fstat(descriptor)) for descriptor in (1, 2))


def _replace(partial: Path, target: Path) -> None:
    if target.exists():
        shutil.copymode(target, partial)
    try:
        partial.replace(target)
    except OSError:
        # A bind-mounted file can be written, but not replaced.
        shutil.copyfile(partial, target)
        partial.unlink()


def _keep(partial: Path, path: Path) -> None:
    if not partial.exists():
        return
    if partial.stat().st_size == 0:
        partial.unlink()
        return
    with partial.open("rb") as file:
        num_lines = sum(1 for _ in file)
    shown = path.with_name(partial.name) if partial.parent == Path(os.path.realpath(path.parent)) else partial
    lines = "1 line is" if num_lines == 1 else f"{num_lines:,} lines are"
    print(
        f"penstock: ended early; {lines} in {shown}, and {path} was not touched. "
        "The same command with --resume answers the rest.",
        file=sys.stderr,
    )
