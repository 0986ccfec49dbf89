"""Reader of the JSON files of a model folder.

A folder may be hostile: a file may be a pipe, larger than memory, or nested deeper than Python's stack.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError

# The largest known files, indices and tokenizers, take 35 MB. The worst text takes 25 times its size when it is read.
MAX_JSON_BYTES = 64 * 2**20
# Levels of lists and objects; no known file has ten.
MAX_DEPTH = 64
# Integers of so many digits fit a float, too.
MAX_DIGITS = 300
_SHOWN = 200
# Tokens of a JSON text: strings, and brackets.
_PARTS = re.compile(r'"(?:[^"\\]++|\\.)*+"|[][{}]')
_KINDS = {str: "a text", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "an object"}


class _LongInteger(str):
    """Digits of an integer that is too long."""


def read_json_object(path: Path, error: type[PenstockError], *, is_optional: bool = False) -> dict[str, Any]:
    """Read the object of a JSON file. is_optional: a missing file counts as an empty object.

    Raises `error`, naming the file and the field, for an unreadable file, and for text and numbers that are invalid.
    """
    if is_optional and not os.path.lexists(path):
        return {}
    check_regular_file(path, error, MAX_JSON_BYTES)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as cause:
        raise unreadable(path, cause, error) from cause
    if len(data) > MAX_JSON_BYTES:
        raise _too_large(path, MAX_JSON_BYTES, error)
    try:
        text = data.decode("utf-8")
        content = json.loads(text, parse_int=_integer)
    except ValueError as cause:
        raise error(f"{path} is damaged: {cause}. Download it again.") from cause
    except RecursionError as cause:
        raise error(
            f"{path} is damaged: {_deep_field(text)} is nested deeper than {MAX_DEPTH} levels. Download it again."
        ) from cause
    if not isinstance(content, dict):
        raise error(f"{path} is damaged: it holds a {type(content).__name__}, not an object.")
    for field, complaint in _unusable(content):
        raise error(f"{path} is damaged: {field} {complaint}. Download it again.")
    return content


def parse_json_text(text: str) -> Any:
    """Parse JSON of a user. Raises ValueError, for nesting that is too deep for a parser too."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def check_regular_file(path: Path, error: type[PenstockError], max_bytes: int | None = None) -> None:
    """Raise `error` for a missing file, one above max_bytes, or a pipe, socket or device, whose reading may not end."""
    try:
        status = path.stat()
    except (OSError, ValueError) as cause:
        raise unreadable(path, cause, error) from cause
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{path} is a {_kind(status.st_mode)}. It must be a regular file.")
    if max_bytes is not None and status.st_size > max_bytes:
        raise _too_large(path, max_bytes, error)


def check_files(folder: Path, error: type[PenstockError], max_bytes: int, limited: tuple[str, ...]) -> None:
    """Raise `error` for a file of a folder whose reading may not end, before a library reads the folder.

    max_bytes: limit of files whose names end with one of `limited`.
    """
    for path in folder.iterdir():
        try:
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        except OSError:  # reading it fails, and does not wait
            continue
        if not is_folder:
            check_regular_file(path, error, max_bytes if path.name.endswith(limited) else None)


def unreadable(path: Path, cause: Exception, error: type[PenstockError]) -> PenstockError:
    """Error for a file that the operating system does not open."""
    reason = (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
    return error(f"{clipped(str(path))} cannot be read: {reason}.")


def typed_field(
    content: Mapping[str, Any], name: str, kinds: tuple[type, ...], path: Path, error: type[PenstockError]
) -> Any:
    """Return a field of a file's object; None if it is absent or null.

    Raises `error`, naming file and field, for a value of another kind. kinds: Python types of JSON values.
    """
    value = content.get(name)
    if value is None or type(value) in kinds:
        return value
    allowed = " or ".join(_KINDS[kind] for kind in kinds)
    raise error(f"{clipped(str(path))} has {name}={shown(value)}. It must be {allowed}, or null.")


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    return clipped(repr(value))


def clipped(text: str) -> str:
    """Text for a message, cut where it is long."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"


def decode_floats(value: Any) -> Any:
    """Decode numbers that JSON lacks, such as infinity, written by Transformers as an object with one field."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: decode_floats(one) for name, one in value.items()}
    return [decode_floats(one) for one in value] if isinstance(value, list) else value


def _too_large(path: Path, max_bytes: int, error: type[PenstockError]) -> PenstockError:
    return error(f"{path} is larger than {max_bytes // 2**20} MiB, which no such file is. Download it again.")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder"}
    return kinds.get(stat.S_IFMT(mode), "device")


def _integer(digits: str) -> int | _LongInteger:
    return int(digits) if len(digits) <= MAX_DIGITS else _LongInteger(digits)


def _unusable(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield fields that are too deep, too long or no valid text, each with its complaint."""
    waiting: list[tuple[Any, str, int]] = [(content, "", 0)]
    while waiting:
        value, field, depth = waiting.pop()
        if isinstance(value, _LongInteger):
            yield clipped(field), f"is a number of {len(value):,} digits (allowed: {MAX_DIGITS})"
        elif isinstance(value, str):
            if not _is_text(value):
                yield clipped(field), f"is {shown(value)}, which holds half a surrogate pair and is not text"
        elif isinstance(value, (dict, list)):
            if depth == MAX_DEPTH:
                yield clipped(field), f"is nested deeper than {MAX_DEPTH} levels"
                continue
            if isinstance(value, dict):
                for name, one in value.items():
                    if not _is_text(name):
                        yield clipped(field) or "a field", f"has the name {shown(name)}, which is not text"
                    waiting.append((one, f"{field}.{name}" if field else name, depth + 1))
            else:
                waiting.extend((one, f"{field}[{index}]", depth + 1) for index, one in enumerate(value))


def _deep_field(text: str) -> str:
    """Name of the outermost object's field that is nested too deep for a parser."""
    depth, field = 0, "it"
    for part in _PARTS.finditer(text):
        token = part[0]
        if token[0] == '"':
            field = clipped(token[1:-1]) if depth == 1 else field
            continue
        depth += 1 if token in "[{" else -1
        if depth > MAX_DEPTH:
            break
    return field


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
