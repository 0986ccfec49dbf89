"""Safetensors files of packed states, written tensor by tensor with checksums; complete once they have their name."""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError
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
# The header's length is a multiple of it, so that tensors are aligned in mapped files.
_ALIGNMENT = 64
UNFINISHED = ".tmp"


def metadata_of(state: PackedState) -> dict[str, str]:
    """Metadata by which a file is one of a packed state."""
    return {} if state.header is None else {HEADER: state.header.encoded()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with checksums, one tensor at a time; it has its name once it is complete and on disk.

    Several processes may write the same file: the last one's stays. Raises OSError.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}{UNFINISHED}")
    checksums = dict.fromkeys(tensors, 0)
    try:
        with unfinished.open("wb") as file:
            file.write(_file_header(tensors, metadata, checksums))
            for name in _by_alignment(tensors):
                data = _bytes_of(tensors[name])
                checksums[name] = zlib.crc32(data)
                file.write(data)
            file.seek(0)
            file.write(_file_header(tensors, metadata, checksums))
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


def read_state(files: WeightFiles, header: PackedHeader | None) -> PackedState:
    """Read a packed state: tensors are views of mapped files. Raises CheckpointError for other bytes than written."""
    tensors = dict(iterate_safetensors(files))
    for path in files.paths:
        with opened(path) as file:
            checksums: Mapping[str, str] = json.loads((file.metadata() or {}).get(_CHECKSUMS, "{}"))
        for name, checksum in checksums.items():
            if name in tensors and f"{zlib.crc32(_bytes_of(tensors[name])):08x}" != checksum:
                raise damaged(path, f"the tensor {name} has other bytes than were written")
    return PackedState(header, tensors)


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
    """Names in an order in which every tensor is aligned to its elements: wide ones first."""
    return sorted(tensors, key=lambda name: -tensors[name].element_size())


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor, copied from a GPU."""
    flat = tensor.detach().contiguous().view(-1)
    data: Any = flat.cpu().view(torch.uint8).numpy()
    return memoryview(data)
