"""Weight files of a model's folder, and their index."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.checkpoints.json_file import check_regular_file, clipped, read_json_object, shown
from penstock.config.load import SHARDED_STATE_PATTERN
from penstock.errors import CheckpointError

_LFS_POINTER = b"version https://git-lfs"
# Maximum number of names in an error.
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class FileNames:
    """File names of a format: a single file, an index of shards, or shards without an index."""

    single: str
    index: str
    shards: str


SAFETENSORS = FileNames("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
PYTORCH_BIN = FileNames("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Weight files. paths: in reading order. expected: tensors by path, from the index."""

    paths: tuple[Path, ...]
    expected: Mapping[Path, frozenset[str]] | None = None


def find_weight_files(folder: Path, names: FileNames) -> WeightFiles | None:
    """Return the folder's weight files of one format, or None.

    Raises CheckpointError for a damaged index or missing files.
    """
    if os.path.lexists(folder / names.single):
        return WeightFiles((folder / names.single,))
    if os.path.lexists(folder / names.index):
        expected = _read_index(folder / names.index)
        return WeightFiles(tuple(sorted(expected)), expected)
    own_state = _part_names(SHARDED_STATE_PATTERN, r"\d+")
    shards = tuple(sorted(path for path in folder.glob(names.shards) if not own_state.fullmatch(path.name)))
    return WeightFiles(shards) if shards else None


def has_weight_files(folder: Path) -> bool:
    """Whether the folder has files of any of these formats, complete or not."""
    return any(list(folder.glob(name)) for names in (SAFETENSORS, PYTORCH_BIN) for name in (names.single, names.shards))


def parts_of_rank(folder: Path, pattern: str, rank: int) -> dict[int, Path]:
    """Return one rank's files by part, for a name pattern with {rank} and {part}."""
    names = _part_names(pattern, str(rank))
    matches = ((names.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in matches if match}


def first_parts(folder: Path, pattern: str) -> list[Path]:
    """Return the first file of each rank in a folder, for a name pattern as of `parts_of_rank`."""
    name = _part_names(pattern.replace("{part}", "0"), r"\d{1,18}")
    return sorted(path for path in folder.iterdir() if name.fullmatch(path.name))


def _part_names(pattern: str, rank: str) -> re.Pattern[str]:
    """Return a regular expression for names of parts, with the number as its group. rank: a regular expression."""
    return re.compile(re.escape(pattern).replace(r"\{rank\}", rank).replace(r"\{part\}", r"(\d{1,18})"))


def what_is_there(folder: Path) -> str:
    """Describe the folder's content, for errors about missing weights."""
    present = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    hint = ""
    if parts_of_rank(folder, SHARDED_STATE_PATTERN, rank=0):
        hint = " It has a model's own state: give load_format='sharded_state'."
    return f"The folder holds {present}.{hint}"


def check_held(
    held: Mapping[Path, frozenset[str]], files: WeightFiles, read: Callable[[Path, str], Tensor]
) -> dict[str, Path]:
    """Return the file of each tensor, by name, wherever the index puts it.

    held: names of the tensors of each file. read: reads one of them. Raises CheckpointError, naming files and tensors,
    for a tensor of the index that no file holds, and for one whose copies in two files differ.
    """
    owners: dict[str, Path] = {}
    for path, names in held.items():
        twice = {name: owners[name] for name in sorted(names & owners.keys())}
        different = [name for name, other in twice.items() if not _are_same(read(other, name), read(path, name))]
        if different:
            raise CheckpointError(
                f"{path} and {owners[different[0]].name} both hold {few(different)} ({len(different)} in all), with "
                "different contents. Remove the files that do not belong to this model."
            )
        owners.update(dict.fromkeys(names - twice.keys(), path))
    for path, wanted in (files.expected or {}).items():
        missing = wanted - owners.keys()
        if missing:
            raise CheckpointError(
                f"{path} lacks tensors that the index puts there, and so do the other files: {few(missing)} "
                f"({len(missing)} in all). The files are of different versions: download the model again."
            )
    return owners


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)


def damaged(path: Path, error: object) -> CheckpointError:
    """Return the error for an unreadable file."""
    if isinstance(error, PermissionError):
        return CheckpointError(f"{path} may not be read by this user: {error}.")
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return CheckpointError(f"{path} is a pointer of Git LFS, not the weights. Run `git lfs pull` there.")
    return CheckpointError(f"{path} is damaged: {error}. Download it again.")


def few(names: Iterable[str]) -> str:
    """Format the first few of many names, for errors."""
    return ", ".join(map(clipped, sorted(names)[:_SHOWN]))


def check_weight_file(path: Path) -> None:
    """Raise CheckpointError unless the file is a regular one: reading a pipe would not end."""
    check_regular_file(path, CheckpointError)


def _read_index(path: Path) -> dict[Path, frozenset[str]]:
    weight_map = read_json_object(path, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(
            path, f"it has weight_map={shown(weight_map)}, which must be an object of tensor names and file names"
        )
    tensors_of: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not _is_file_name(file):
            raise damaged(
                path, f"weight_map names {shown(file)} for {clipped(tensor)}, which is not a file of the folder"
            )
        tensors_of.setdefault(file, set()).add(tensor)
    missing = tensors_of.keys() - set(os.listdir(path.parent))
    if missing:
        raise CheckpointError(
            f"{path.parent} lacks {few(missing)}, which {path.name} names ({len(missing)} files in all). "
            "Download the missing files."
        )
    return {path.parent / file: frozenset(tensors) for file, tensors in tensors_of.items()}


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and os.path.basename(value) == value
