"""Reader of one tensor that `torch.save` has written: its bytes only, without running what a pickle asks for.

The file is a zip archive, uncompressed, with a pickle that describes the tensor and an entry with its storage. The
pickle may name nothing but the functions and types that describe a plain tensor of floats.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidRequest
from penstock.media.base64_text import base64_bytes

# Storages by their name in the pickle, and numpy's dtype of their bytes. bfloat16 is the upper half of a float32.
_STORAGES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": "<u2", "LongStorage": "<i8"}
_MAX_PICKLE_BYTES = 1 << 16


class _Reader(pickle._Unpickler):
    """Unpickler of a tensor's description. The one of C would allocate what a damaged pickle asks for.

    tensor: the last one that it has described, on the archive's bytes.
    """

    def __init__(self, archive: zipfile.ZipFile, folder: str, max_bytes: int, max_rows: int) -> None:
        super().__init__(io.BytesIO(_entry(archive, f"{folder}data.pkl", _MAX_PICKLE_BYTES)))
        self._archive, self._folder, self._max_bytes, self._max_rows = archive, folder, max_bytes, max_rows
        self._storage: NDArray[Any] | None = None
        self.tensor: NDArray[Any] | None = None

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._rebuilt
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return name
        raise InvalidRequest(
            f"it names {module}.{name}. Allowed: one dense tensor of float32, float16, bfloat16 or int64"
        )

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        """Values of a storage, whose bytes are read once."""
        _, name, key, *_ = pid
        if self._storage is not None:
            raise InvalidRequest("it has several storages. Allowed: one tensor")
        stored = _entry(self._archive, f"{self._folder}data/{key}", self._max_bytes)
        self._storage = np.frombuffer(stored, _STORAGES[name])
        return self._storage

    def _rebuilt(self, values: NDArray[Any], offset: int, size: Any, stride: Any, *_: Any) -> NDArray[Any]:
        if values is not self._storage:
            raise InvalidRequest("its values are not a storage of it. Allowed: one tensor")
        self.tensor = _view(values, offset, tuple(size), tuple(stride), self._max_rows)
        return self.tensor


def read_saved_tensor(name: str, text: str, max_rows: int) -> NDArray[Any]:
    """Read base64 of what `torch.save` writes: a tensor of 1 to 3 dimensions, as float32, float16 or int64.

    name: of the field. max_rows: most rows of the last dimension. Raises InvalidRequest for anything else.
    """
    try:
        return _read(_bytes(text), max_rows)
    except InvalidRequest as error:
        reason = str(error)
    # A damaged archive or pickle raises anything.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    raise InvalidRequest(
        f"{name} is not a saved tensor: {reason}. Give base64 of the bytes that torch.save(tensor, file) writes."
    )


def _bytes(text: str) -> bytes:
    try:
        return base64_bytes(text)
    except ValueError:
        raise InvalidRequest("it is not base64") from None


def _read(data: bytes, max_rows: int) -> NDArray[Any]:
    if not zipfile.is_zipfile(io.BytesIO(data)):
        raise InvalidRequest("it is not a zip archive, as torch.save writes")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickles = [one for one in archive.namelist() if one.endswith("data.pkl")]
        if len(pickles) != 1:
            raise InvalidRequest("its archive has no data.pkl")
        folder = pickles[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and _entry(archive, f"{folder}byteorder", 16) != b"little":
            raise InvalidRequest("its byte order is not little-endian")
        reader = _Reader(archive, folder, len(data), max_rows)
        saved = reader.load()
    if reader.tensor is None or saved is not reader.tensor:
        raise InvalidRequest(f"it holds a {type(saved).__name__}. Allowed: a tensor")
    if saved.dtype.kind == "u":
        return (saved.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(saved)


def _entry(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > max_bytes:
        raise InvalidRequest(f"{name} of its archive is compressed, or has more than {max_bytes:,} bytes")
    return archive.read(info)


def _view(values: NDArray[Any], offset: int, size: tuple[int, ...], stride: tuple[int, ...], max_rows: int) -> Any:
    numbers = (offset, *size, *stride)
    is_valid = len(size) in (1, 2, 3) and len(stride) == len(size)
    if not is_valid or not all(type(one) is int and one >= 0 for one in numbers):
        raise InvalidRequest(f"its shape is {list(size)}. Allowed: 1 to 3 dimensions")
    num_rows = int(np.prod(size[:-1], dtype=object))
    if not 0 < num_rows <= max_rows or size[-1] == 0:
        raise InvalidRequest(f"its shape is {list(size)}. Allowed: 1 to {max_rows:,} rows")
    last = offset + sum((one - 1) * step for one, step in zip(size, stride, strict=True))
    if last >= len(values) or size[-1] > len(values):
        raise InvalidRequest(f"its shape is {list(size)}, and its storage has {len(values):,} values")
    steps = [step * values.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(values[offset:], size, steps, writeable=False)
