"""Weights from PyTorch `.bin` files: pickles, restricted to plain tensors."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.loader.weight_files import (
    WeightFiles,
    check_held,
    check_weight_file,
    damaged,
    few,
)


def check_pytorch_bins(files: WeightFiles) -> int:
    """Read the pickles of all files before any tensor; return the number of tensors.

    Raises CheckpointError, naming the file, for a damaged file, a mismatch with the index or another file, or a pickle
    of anything but tensors.
    """
    held: dict[Path, frozenset[str]] = {}
    for path in files.paths:
        check_weight_file(path)
        _check_archive(path)
        held[path] = frozenset(_read(path))
    return len(check_held(held, files, lambda path, name: _read(path)[name]))


def iterate_pytorch_bins(files: WeightFiles) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of checked files by name, as views of the mapped files."""
    seen: set[str] = set()
    for path in files.paths:
        found = {name: tensor for name, tensor in _read(path).items() if name not in seen}
        seen.update(found)
        yield from found.items()


def _read(path: Path) -> Mapping[str, Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, and unpickling it could run any code, so it is refused: "
            f"{_first_line(error)} Convert the model to safetensors, or take a checkpoint in that format."
        ) from error
    except Exception as error:  # any error of a damaged pickle
        raise damaged(path, _first_line(error)) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}. It must hold tensors by name.")
    strange = [str(name) for name, value in content.items() if not isinstance(name, str) or not _is_plain(value)]
    if strange:
        raise CheckpointError(
            f"{path} holds entries that are not tensors: {few(strange)} ({len(strange)} in all). It must hold the "
            "model's tensors by name, all of them with values and dense, and nothing else."
        )
    return content


def _check_archive(path: Path) -> None:
    """Raise CheckpointError unless the file is a zip archive whose content is no larger than the file."""
    try:
        if not is_zipfile(path):
            raise BadZipFile(
                "it is not a zip archive, as torch.save has written since PyTorch 1.6 (or it is truncated)"
            )
        with ZipFile(path) as archive:
            num_bytes = sum(member.file_size for member in archive.infolist())
    except (BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise damaged(path, _first_line(error)) from error
    if num_bytes > path.stat().st_size:
        raise damaged(path, f"it is a compressed archive of {num_bytes:,} bytes, and torch.save compresses nothing")


def _is_plain(value: Any) -> bool:
    """Whether a value is a dense tensor: neither sparse, quantized, nor on the meta device."""
    return (
        torch.is_tensor(value)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and not value.is_nested
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
