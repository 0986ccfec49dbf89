"""Weights from PyTorch `.bin` files: pickles, of which only plain tensors are read."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.loader.weight_files import WeightFiles, check_against_index, damaged, refuse_duplicates


def iterate_pytorch_bins(files: WeightFiles) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by name; each is a view of the mapped file.

    Raises CheckpointError, naming the file, when one is damaged, disagrees with the index or another file, or is no
    plain pickle of tensors.
    """
    owners: dict[str, Path] = {}
    for path in files.paths:
        tensors = _read(path)
        held = frozenset(tensors)
        check_against_index(path, held, files)
        refuse_duplicates(owners, path, held)
        owners.update(dict.fromkeys(held, path))
        yield from tensors.items()


def _read(path: Path) -> Mapping[str, Tensor]:
    if not is_zipfile(path):
        raise damaged(path, "it is no zip archive, as torch.save has written since PyTorch 1.6 (or it is truncated)")
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, and unpickling it could run any code, so it is refused: "
            f"{_first_line(error)} Convert the model to safetensors, or take a checkpoint in that format."
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise damaged(path, _first_line(error)) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}. It must hold tensors by name.")
    strange = [str(name) for name, value in content.items() if not isinstance(name, str) or not torch.is_tensor(value)]
    if strange:
        raise CheckpointError(
            f"{path} holds entries that are no tensors: {', '.join(strange[:8])} ({len(strange)} in all). "
            "It must hold the model's tensors by name, and nothing else."
        )
    return content


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
