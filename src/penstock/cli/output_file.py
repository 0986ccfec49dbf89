"""A command's output file, which takes its name once it is complete."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TextIO

from penstock.cli.failures import file_named
from penstock.errors import ConfigError

# Names of open files, behind which there may be a regular one that is not ours to replace.
_OPEN_FILES = ("/dev/fd/", "/proc/")


def refuse_same_file(input: Path, output: Path, *, is_standard_input: bool) -> None:
    """Raise ConfigError if `output` is the file that the requests come from, whatever the names of both."""
    try:
        source = os.fstat(0) if is_standard_input else input.stat()
        target = output.stat()
    except OSError:
        return
    if stat.S_ISREG(source.st_mode) and os.path.samestat(source, target):
        raise ConfigError(
            f"--output {output} is the file of --input {input}. Give another one, which becomes the output."
        )


@contextmanager
def output_file(path: Path) -> Iterator[TextIO]:
    """A UTF-8 file for what is to be at `path`.

    Until it is complete it has a name of its own, `.partial` behind that of the file. So what was there stays, whatever
    ends the command, and what was written by then is kept: a message says where. Symbolic links stay links. What cannot
    be replaced is written in place: pipes, devices, open files, and files in folders that take no other.

    Raises ConfigError when it cannot be opened.
    """
    target = Path(os.path.realpath(path))
    with file_named("--output", path):
        partial = _open_partial(path, target)
        file = partial or path.open("w", encoding="utf-8")
    if partial is None:
        with file:
            yield file
        return
    try:
        with file:
            yield file
        _replace(Path(file.name), target)
    except BaseException:
        _keep(Path(file.name), path)
        raise


def _open_partial(path: Path, target: Path) -> TextIO | None:
    """A new file beside the target, or None if the target must be written in place."""
    if path.exists():
        if not path.is_file() or _is_open(path):
            return None
        # It may be one that must not be written.
        target.open("a").close()
    for number in count(1):
        name = f"{target.name}.partial{number if number > 1 else ''}"
        try:
            return target.with_name(name).open("x", encoding="utf-8")
        except FileExistsError:
            continue
        except PermissionError:
            if path.exists():
                return None
            raise
    raise AssertionError("there is always another number")


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
        # A file that is mounted by itself, for one, can be written and not replaced.
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
    print(f"penstock: ended early; {lines} in {shown}, and {path} was not touched.", file=sys.stderr)
