"""Safetensors files of packed states, written tensor by tensor with checksums; complete once they have their name."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.loader.headers import meta_tensor
from penstock.loader.packed_header import HEADER, PackedHeader, checked_header, decode_object
from penstock.loader.packed_state import PackedState
from penstock.loader.safetensors import iterate_safetensors, opened, peek_safetensors
from penstock.loader.weight_files import WeightFiles, damaged

# Fields of the metadata.
_CHECKSUMS = "crc32"
# Names of dtypes in safetensors files.
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
# A cache line. The header's length is a multiple of it, so that tensors are aligned in mapped files.
_ALIGNMENT = 64
# MAP_NORESERVE: a private mapping may be larger than memory.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
UNFINISHED = ".tmp"


def metadata_of(state: PackedState) -> dict[str, str]:
    """Metadata by which a file is one of a packed state."""
    return {} if state.header is None else {HEADER: state.header.encoded()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with checksums, one tensor at a time; it has its name once it is complete and on disk.

    Several processes may write the same file: the last one's stays. Raises OSError.
    """
    checksums = dict.fromkeys(tensors, 0)
    with _unfinished(path) as file:
        file.write(_file_header(tensors, metadata, checksums))
        for name in _by_alignment(tensors):
            data = _bytes_of(tensors[name])
            checksums[name] = zlib.crc32(data)
            file.write(data)
        file.seek(0)
        file.write(_file_header(tensors, metadata, checksums))


@contextmanager
def filling_file(
    path: Path, forms: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[Mapping[str, Tensor]]:
    """Write a safetensors file as `write_tensors`, whose tensors the caller fills: zeros in the memory of the file.

    forms: tensors of the same shapes and dtypes. The system writes pages to the disk while it needs their memory. The
    space is reserved first. Raises OSError without enough; the file stays away after any error.
    """
    with _unfinished(path) as file:
        header = _file_header(forms, metadata, dict.fromkeys(forms, 0))
        size = len(header) + sum(tensor.numel() * tensor.element_size() for tensor in forms.values())
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        file.write(header)
        file.flush()
        tensors = map_tensors(file, is_shared=True)
        yield tensors
        checksums = {name: zlib.crc32(_bytes_of(tensor)) for name, tensor in tensors.items()}
        file.seek(0)
        file.write(_file_header(forms, metadata, checksums))


@contextmanager
def _unfinished(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its name once it is complete and on disk."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with unfinished.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class PackedFiles:
    """A packed state in safetensors files. header: None for a sharded state of floats."""

    files: WeightFiles
    header: PackedHeader | None

    def read(self) -> PackedState:
        return read_state(self.files, self.header)

    def peek(self) -> PackedState:
        """The state with meta tensors."""
        return peek_state(self.files, self.header)


def read_header(files: WeightFiles) -> PackedHeader | None:
    """Return the header of a packed state; None for files of another kind. Raises CheckpointError for a damaged one."""
    path = files.paths[0]
    with opened(path) as file:
        written = (file.metadata() or {}).get(HEADER)
    return None if written is None else checked_header(path, decode_object(path, written))


def read_state(files: WeightFiles, header: PackedHeader | None, in_place_bytes: int = 0) -> PackedState:
    """Read a packed state: tensors are views of mapped files. Raises CheckpointError for other bytes than written.

    in_place_bytes: at most so many bytes of tensors are for a model to take as they are, so that their pages are read
    when they are used, and the system drops them as it needs memory. All are in one file then.
    """
    if in_place_bytes:
        with files.paths[0].open("rb") as mapped:
            tensors = map_tensors(mapped, is_shared=False)
    else:
        tensors = dict(iterate_safetensors(files))
    _check_sums(files, tensors)
    return PackedState(header, tensors, _most_suitable(tensors, in_place_bytes))


def _check_sums(files: WeightFiles, tensors: Mapping[str, Tensor]) -> None:
    for path in files.paths:
        with opened(path) as file:
            checksums: Mapping[str, str] = json.loads((file.metadata() or {}).get(_CHECKSUMS, "{}"))
        for name, checksum in checksums.items():
            if name in tensors and f"{zlib.crc32(_bytes_of(tensors[name])):08x}" != checksum:
                raise damaged(path, f"the tensor {name} has other bytes than were written")


def _most_suitable(tensors: Mapping[str, Tensor], most_bytes: int) -> frozenset[str]:
    """Choose tensors that may stay in a file, of so many bytes at most: those first of which a step reads least."""
    chosen: set[str] = set()
    for name in sorted(tensors, key=lambda name: (".method." in name, ".experts." not in name)):
        tensor = tensors[name]
        is_aligned = tensor.data_ptr() % _ALIGNMENT == 0 and tensor.nbytes >= mmap.PAGESIZE
        if is_aligned and tensor.nbytes <= most_bytes:
            chosen.add(name)
            most_bytes -= tensor.nbytes
    return frozenset(chosen)


def map_tensors(file: BinaryIO, *, is_shared: bool) -> dict[str, Tensor]:
    """Map a safetensors file whose header is known to be valid; return its tensors, which keep the mapping alive.

    is_shared: what is written to the tensors goes to the file; else to memory of their own, which takes none before.
    """
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    entries: Mapping[str, Any] = json.loads(file.read(length))
    flags = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE | _NO_RESERVE
    region = mmap.mmap(file.fileno(), 0, flags=flags)
    tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            form = meta_tensor(name, entry["dtype"], entry["shape"])
            tensors[name] = torch.empty(form.shape, dtype=form.dtype)
            if end > begin:
                flat = torch.frombuffer(region, dtype=form.dtype, count=form.numel(), offset=8 + length + begin)
                tensors[name] = flat.view(form.shape)
    return tensors


def peek_state(files: WeightFiles, header: PackedHeader | None) -> PackedState:
    """Read a packed state with meta tensors in place of values; scales of a KV cache have none."""
    found = peek_safetensors(files, lambda _: False)
    return PackedState(header, {name: tensor if tensor.is_meta else tensor.to("meta") for name, tensor in found})


def _file_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], checksums: Mapping[str, int]) -> bytes:
    """Length and header of a file, of the same size for any checksums."""
    crc32 = json.dumps({name: f"{checksum:08x}" for name, checksum in checksums.items()})
    entries: dict[str, Any] = {"__metadata__": {**metadata, _CHECKSUMS: crc32}}
    begin = 0
    for name in _by_alignment(tensors):
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which a safetensors file cannot have.")
        end = begin + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    header = json.dumps(entries).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def _by_alignment(tensors: Mapping[str, Tensor]) -> Iterable[str]:
    """Names in an order in which every tensor is aligned to its elements, wide ones first, and those of whole cache
    lines to these.
    """

    def key(name: str) -> tuple[bool, int]:
        size = tensors[name].element_size()
        return tensors[name].numel() * size % _ALIGNMENT != 0, -size

    return sorted(tensors, key=key)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor, copied from a GPU."""
    flat = tensor.detach().contiguous().view(-1)
    data: Any = flat.cpu().view(torch.uint8).numpy()
    return memoryview(data)
