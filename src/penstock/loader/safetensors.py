"""Weights from memory-mapped safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.loader.weight_files import (
    WeightFiles,
    check_against_index,
    check_weight_file,
    damaged,
    refuse_duplicates,
)


def check_safetensors(files: WeightFiles) -> int:
    """Read all headers before any tensor; return the number of tensors.

    Raises CheckpointError, naming file and tensor, for truncated or damaged files, or a mismatch between them.
    """
    owners: dict[str, Path] = {}
    for path in files.paths:
        with opened(path) as file:
            held = frozenset(file.keys())
        check_against_index(path, held, files)
        refuse_duplicates(owners, path, held)
        owners.update(dict.fromkeys(held, path))
    return len(owners)


def iterate_safetensors(files: WeightFiles) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors by name, as views of the mapped files, which they keep alive.

    Raises CheckpointError when a tensor cannot be read.
    """
    for path in files.paths:
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, _tensor(file, name, path)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file with `safe_open`. Raises CheckpointError, naming it, if it cannot be read."""
    check_weight_file(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, error) from error


def _tensor(file: Any, name: str, path: Path) -> Tensor:
    try:
        tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: the tensor {name} cannot be read: {error}. Download the file again.") from error
    return tensor
