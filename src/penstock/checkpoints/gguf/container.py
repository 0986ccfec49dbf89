"""Header of a GGUF file: metadata and tensor descriptions, read from the mapped file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Nothing of a file is executed; a damaged or
truncated one is refused with the offset.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoints.json_file import check_regular_file, clipped, shown
from penstock.errors import CheckpointError, UnsupportedFeature

SUFFIX = ".gguf"
# In the names of files that have the encoder of a multimodal model alone, as in llama.cpp.
_ENCODER = "mmproj"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
# Limits far above any model's: the largest known headers, those of vocabularies of 262,144 tokens, take 30 MB. Python's
# lists of a header take up to 30 times its size.
_MAX_HEADER_BYTES = 128 * 2**20
_MAX_ENTRIES = 65_536
_MAX_TENSORS = 262_144
_MAX_ELEMENTS = 2**22
# Format of each scalar type, by its number; string and array are 8 and 9.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
# Bytes of the shortest entry of the metadata, and of the shortest tensor description.
_SHORTEST_ENTRY = 13
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Description of a tensor. shape: outermost dimension first, as in PyTorch. kind: number of its type.

    start: offset of its data in the file `path`. data_start: that of the file's first tensor. alignment: of the
    tensors' offsets from there.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    data_start: int
    alignment: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata by key, and descriptions of the tensors, in the file's order."""

    metadata: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]


def is_gguf(path: Path) -> bool:
    """Whether the name is that of a GGUF file."""
    return path.name.lower().endswith(SUFFIX)


def parts_of(path: Path) -> list[Path]:
    """Files of a model by one of them: itself, or all `NAME-00001-of-0000N.gguf`.

    Raises CheckpointError if one is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing or not names:
        raise CheckpointError(
            f"{path.parent} lacks {', '.join(missing[:8]) or 'every part'} ({len(missing)} of {count} files of "
            f"{match['stem']}). Download the missing files."
        )
    return [path.parent / name for name in names]


def models_in(folder: Path) -> list[Path]:
    """First files of the GGUF models in a folder, without encoders of images and audio beside these."""
    found = sorted(path for path in folder.iterdir() if is_gguf(path))
    found = [path for path in found if not _is_encoder(path)] or found
    return [path for path in found if (match := _PART.fullmatch(path.name)) is None or int(match["number"]) == 1]


def encoders_in(folder: Path) -> list[Path]:
    """Files with encoders of images and audio in a folder, the largest first, which has the most exact values."""
    found = sorted(path for path in folder.iterdir() if is_gguf(path) and _is_encoder(path))
    return sorted(found, key=lambda path: -path.stat().st_size)


def _is_encoder(path: Path) -> bool:
    return _ENCODER in path.name.lower()


def read_header(path: Path) -> Header:
    """Read the header of one file. Raises CheckpointError, with the offset, for a damaged one."""
    with mapped(path) as data:
        return _Reader(path, data).header()


def read_headers(paths: list[Path]) -> Header:
    """Read the headers of a model's files: metadata of the first, tensors of all.

    Raises CheckpointError for a damaged file, files of different models, and a tensor that is there twice.
    """
    headers = [read_header(path) for path in paths]
    tensors = [tensor for header in headers for tensor in header.tensors]
    expected = headers[0].metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise CheckpointError(
            f"{paths[0]} says that the model has split.tensors.count={shown(expected)}, but its {len(paths)} files "
            f"have {len(tensors)}. They are of different models: download them again."
        )
    seen: dict[str, TensorInfo] = {}
    for tensor in tensors:
        if tensor.name in seen:
            raise CheckpointError(
                f"{tensor.path} and {seen[tensor.name].path.name} both hold {clipped(tensor.name)}. Remove the files "
                "that do not belong to this model."
            )
        seen[tensor.name] = tensor
    return Header(headers[0].metadata, tuple(tensors))


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map a file for reading. Raises CheckpointError, naming it, if that is impossible."""
    check_regular_file(path, CheckpointError)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except (OSError, ValueError) as error:  # a ValueError for an empty file
        raise CheckpointError(f"{path} cannot be read: {error}. Download it again.") from error


class _Reader:
    """Reader of a mapped file, from an offset on."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._offset = 0

    def header(self) -> Header:
        version = self._version()
        num_tensors = self._count("tensors", _MAX_TENSORS)
        num_entries = self._count("metadata entries", _MAX_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._text()
            if key in metadata:
                raise self._damaged(f"the metadata has {clipped(key)} twice")
            metadata[key] = self._value(self._number("I"))
        infos = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment={shown(alignment)} is not a power of two")
        start = -(-self._offset // alignment) * alignment
        tensors = tuple(
            TensorInfo(self._path, name, shape, kind, start + offset, start, alignment)
            for name, shape, kind, offset in infos
        )
        return Header({**metadata, "GGUF.version": version}, tensors)

    def _version(self) -> int:
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise self._damaged(f"it begins with {self._data[:4]!r} instead of {_MAGIC!r}")
        self._offset = len(_MAGIC)
        version = int(self._number("I"))
        if version not in _VERSIONS:
            byte_order = " in big-endian order" if version & 0xFFFF == 0 else ""
            raise UnsupportedFeature(
                f"{self._path} is of GGUF version {version:#x}{byte_order}, which is not supported. Supported: "
                f"{', '.join(map(str, _VERSIONS))}, little-endian. Convert it with a current llama.cpp."
            )
        return version

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._text(), self._number("I")
        if num_dims > _MAX_DIMS:
            raise self._damaged(f"the tensor {clipped(name)} has {num_dims} dimensions (allowed: {_MAX_DIMS})")
        dims = [int(self._number("Q")) for _ in range(num_dims)]
        return name, tuple(reversed(dims)), int(self._number("I")), int(self._number("Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._damaged(f"a value has the type {kind}, which does not exist")
        value = self._number(_SCALARS[kind])
        return shortest_float(value) if kind == _FLOAT32 else value

    def _array(self) -> list[Any]:
        kind, length = self._number("I"), self._number("Q")
        if length > _MAX_ELEMENTS:
            raise self._damaged(f"an array has {length} elements (allowed: {_MAX_ELEMENTS})")
        if kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
            piece = self._take(length * size)
            return list(struct.unpack(f"<{length}{_SCALARS[kind]}", piece))
        if kind != _STRING:
            raise self._damaged(f"an array has elements of the type {kind}, which is not supported")
        return [self._text() for _ in range(length)]

    def _text(self) -> str:
        start, length = self._offset, self._number("Q")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            self._offset = start
            raise self._damaged(f"a text is not UTF-8 ({error})") from error

    def _count(self, noun: str, most: int) -> int:
        count = int(self._number("Q"))
        if count * _SHORTEST_ENTRY > len(self._data):
            raise self._damaged(f"{count} {noun} do not fit into the file")
        if count > most:
            raise self._damaged(f"it has {count} {noun} (allowed: {most})")
        return count

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _take(self, num_bytes: int) -> bytes:
        end = self._offset + num_bytes
        if end > len(self._data):
            raise self._damaged(f"it ends at {len(self._data)}, but the header goes on for at least {num_bytes} bytes")
        if end > _MAX_HEADER_BYTES:
            raise self._damaged(f"the header is longer than {_MAX_HEADER_BYTES // 2**20} MiB, which no model's is")
        piece = self._data[self._offset : end]
        self._offset = end
        return piece

    def _damaged(self, complaint: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged at offset {self._offset}: {complaint}. Download it again.")


def shortest_float(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05 for 9.999999747378752e-06."""
    rounded = (float(f"{value:.{digits}g}") for digits in range(6, 9))
    return next((one for one in rounded if struct.pack("<f", one) == struct.pack("<f", value)), value)
