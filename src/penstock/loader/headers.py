"""What a checkpoint's files hold, from their headers: names, shapes and dtypes, and no weight is read. Needs no torch.

Formats: https://github.com/huggingface/safetensors#format, and for `.bin` the zip archives of torch.save.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from penstock.config import LoadConfig
from penstock.config.load import SHARDED_STATE
from penstock.errors import CheckpointError
from penstock.loader.weight_files import PYTORCH_BIN, SAFETENSORS, damaged, find_weight_files, parts_of_rank

# By their names in files.
_DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
}
_LENGTH_BYTES = 8
# As much as the format's own library accepts.
_MAX_HEADER_BYTES = 100_000_000
# What unpickling and unpacking raise at damage.
_UNREADABLE = (
    OSError,
    ValueError,
    BadZipFile,
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """dtype: as the file names it, such as "BF16"."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def read_headers(folder: Path, load_format: str = "auto") -> dict[str, TensorHeader] | None:
    """The tensors of a folder's checkpoint by name, or None when it holds none in this format.

    Raises CheckpointError when a file is damaged or missing.
    """
    if load_format in ("auto", "safetensors"):
        files = find_weight_files(folder, SAFETENSORS)
        if files is not None:
            return read_all_headers(files.paths)
    if load_format in ("auto", "pt"):
        files = find_weight_files(folder, PYTORCH_BIN)
        if files is not None:
            return read_all_headers(files.paths, pytorch_bin_header)
    return None


def stored_dtype(headers: Mapping[str, TensorHeader]) -> str | None:
    """The dtype of a checkpoint's matrices: float32 where they differ, None where it has none of floats."""
    dtypes = {_DTYPES[header.dtype] for header in headers.values() if len(header.shape) > 1 and header.dtype in _DTYPES}
    return dtypes.pop() if len(dtypes) == 1 else "float32" if dtypes else None


def find_stored_dtype(folder: Path, load_config: LoadConfig) -> str | None:
    """`stored_dtype` of a folder's weights; None where there are none, or they are damaged, which loading will say."""
    try:
        if load_config.load_format == SHARDED_STATE:
            parts = parts_of_rank(folder, load_config.sharded_state_pattern, rank=0)
            return stored_dtype(read_all_headers(parts.values()))
        return stored_dtype(read_headers(folder, load_config.load_format) or {})
    except CheckpointError:
        return None


def read_all_headers(
    paths: Iterable[Path], read: Callable[[Path], Mapping[str, TensorHeader]] | None = None
) -> dict[str, TensorHeader]:
    """The tensors of several files, of safetensors unless `read` reads others."""
    tensors: dict[str, TensorHeader] = {}
    for path in paths:
        tensors.update((read or safetensors_header)(path))
    return tensors


def safetensors_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one file.

    Raises CheckpointError when the header is damaged, or the file has another size than it says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
            if length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise ValueError(f"its header of {length} bytes does not fit into it")
            content = json.loads(file.read(length))
        content.pop("__metadata__", None)
        end = max((info["data_offsets"][1] for info in content.values()), default=0)
        if _LENGTH_BYTES + length + end != size:
            raise ValueError(f"it has {size} bytes instead of {_LENGTH_BYTES + length + end}")
        return {name: TensorHeader(str(info["dtype"]), tuple(info["shape"])) for name, info in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise damaged(path, error) from error


def pytorch_bin_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one file, from its pickle. Nothing that the pickle names is imported or run.

    Raises CheckpointError when the file is damaged or holds anything but tensors by name.
    """
    try:
        with ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            content = _HeaderUnpickler(io.BytesIO(archive.read(name))).load()
        if not isinstance(content, Mapping) or not all(isinstance(value, TensorHeader) for value in content.values()):
            raise ValueError("it holds more than tensors by name")
    except _UNREADABLE as error:
        raise damaged(path, error) from error
    return dict(content)


class _Storage:
    """Stands for a storage class, whose name has the dtype: FloatStorage."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Dictionary(dict[Any, Any]):
    """Takes attributes, as the ordered one of a module's state does."""


class _HeaderUnpickler(pickle.Unpickler):
    """Sees what torch.save writes for tensors, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "collections" and name == "OrderedDict":
            return _Dictionary
        if module == "torch" and name.endswith("Storage"):
            return _Storage(name)
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            # Storage, offset, shape, strides and more.
            return lambda *parts: TensorHeader(parts[0], tuple(parts[2]))
        if module == "torch._utils" and name == "_rebuild_parameter":
            return lambda *parts: parts[0]
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no tensor")

    def persistent_load(self, pid: Any) -> str:
        return str(pid[1].name)
