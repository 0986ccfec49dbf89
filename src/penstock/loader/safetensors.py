"""Weights from memory-mapped safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.loader.headers import meta_tensor
from penstock.loader.weight_files import (
    WeightFiles,
    check_held,
    check_weight_file,
    damaged,
)


def check_safetensors(files: WeightFiles) -> int:
    """Read all headers before any tensor; return the number of tensors.

    Raises CheckpointError, naming file and tensor, for truncated or damaged files, or a mismatch between them.
    """
    held: dict[Path, frozenset[str]] = {}
    for path in files.paths:
        with opened(path, framework="np") as file:
            held[path] = frozenset(file.keys())
    return len(check_held(held, files, _read))


def iterate_safetensors(files: WeightFiles) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of checked files by name, as views of the mapped files, which they keep alive.

    Raises CheckpointError when a tensor cannot be read.
    """
    seen: set[str] = set()
    for path in files.paths:
        with opened(path) as file:
            names = [name for name in file.keys() if name not in seen]  # noqa: SIM118 - not a dict
            seen.update(names)
            for name in names:
                yield name, _tensor(file, name, path)


def peek_safetensors(files: WeightFiles, has_values: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Iterate over meta tensors by name, from the headers, so that no time is spent on reading weights.

    Scalars and vectors of integers, which may describe the format of others, have values, and so have tensors for which
    `has_values` is true. Raises CheckpointError when a header or one of these tensors cannot be read.
    """
    seen: set[str] = set()
    for path in files.paths:
        with opened(path, framework="np") as header:
            names = [name for name in header.keys() if name not in seen]  # noqa: SIM118 - not a dict
            seen.update(names)
            entries = {name: header.get_slice(name) for name in names}
            found = {name: meta_tensor(name, entry.get_dtype(), entry.get_shape()) for name, entry in entries.items()}
        read = [name for name, tensor in found.items() if has_values(name) or _is_integer_vector(tensor)]
        if read:
            with opened(path) as file:
                found.update((name, _tensor(file, name, path)) for name in read)
        yield from found.items()


@contextmanager
def opened(path: Path, framework: str = "pt") -> Iterator[Any]:
    """Open a file with `safe_open`. Raises CheckpointError, naming it, if it cannot be read.

    framework: "np" maps a file read-only, which works for one larger than memory.
    """
    check_weight_file(path)
    try:
        with safe_open(path, framework=framework, device="cpu") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, error) from error


def _is_integer_vector(tensor: Tensor) -> bool:
    return tensor.dim() < 2 and not tensor.is_floating_point()


def _read(path: Path, name: str) -> Tensor:
    with opened(path) as file:
        return _tensor(file, name, path)


def _tensor(file: Any, name: str, path: Path) -> Tensor:
    try:
        tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: the tensor {name} cannot be read: {error}. Download the file again.") from error
    return tensor
