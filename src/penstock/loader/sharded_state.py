"""Sharded state: each rank's weights on disk as they are in memory, without splitting or fusing at load.

Names are the model's parameter names, not the checkpoint's; files belong to one rank. Quantised weights are a packed
state (`packed_state`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from torch import Tensor, nn

from penstock.checkpoints.json_file import shown
from penstock.config import LoadConfig
from penstock.config.load import SHARDED_STATE, SHARDED_STATE_PATTERN, TENSORIZER, check_sharded_state_pattern
from penstock.errors import CheckpointError, ConfigError
from penstock.layers.linear import process_weights_after_loading, restore_weights
from penstock.layers.weights import WeightSlot
from penstock.loader.kv_cache_scales import scales_of_state
from penstock.loader.packed_files import PackedFiles, metadata_of, read_header, write_tensors
from penstock.loader.packed_state import PackedState
from penstock.loader.safetensors import opened
from penstock.loader.tensorized import TensorizedState, default_uri
from penstock.loader.weight_files import WeightFiles, check_arrangement, damaged, parts_of_rank, sizes_of
from penstock.parallel import ParallelState

_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
# Maximum number of missing parts in an error.
_SHOWN = 8


def state_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Return the state's tensors by name, shared ones once.

    The weights must be unpacked.
    """
    slots: dict[str, WeightSlot] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            slots[name] = WeightSlot(tuple(tensor.shape), tensor)
    return slots


def save_sharded_state(
    model: nn.Module,
    folder: Path,
    parallel: ParallelState,
    pattern: str = SHARDED_STATE_PATTERN,
    max_size: int | None = None,
    packed: PackedState | None = None,
) -> list[Path]:
    """Write this rank's state into files of at most `max_size` bytes (at least one tensor each); None: one file.

    packed: of a quantised model; None writes parameters of floats, which are unpacked meanwhile, so no step may run.
    Files are renamed to their names when complete. Needs no more memory than the model.
    Raises ConfigError for a bad pattern or size, and for a folder with such files already.
    """
    check_sharded_state_pattern(pattern)
    if max_size is not None and (not isinstance(max_size, int) or isinstance(max_size, bool) or max_size < 1):
        raise ConfigError(f"max_size={max_size!r} is not valid. Allowed: a positive number of bytes, or None.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made a folder: {error.strerror}. Give another path.") from error
    present = parts_of_rank(folder, pattern, parallel.rank)
    if present:
        raise ConfigError(f"{folder} holds {present[min(present)].name} already. Give an empty folder.")
    if packed is not None:
        return _write_parts(packed.tensors, folder, parallel, pattern, max_size, metadata_of(packed))
    restore_weights(model)
    try:
        tensors = {name: slot.target.detach() for name, slot in state_slots(model).items()} | scales_of_state(model)
        return _write_parts(tensors, folder, parallel, pattern, max_size, {})
    finally:
        process_weights_after_loading(model)


def copy_model_files(source: Path, target: Path) -> None:
    """Copy a model folder's other files (configuration, tokenizer) to the target; keeps existing files."""
    for path in source.iterdir():
        is_wanted = path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHT_SUFFIXES)
        if is_wanted and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


def find_sharded_files(folder: Path, pattern: str, parallel: ParallelState) -> WeightFiles:
    """Return this rank's files, in order.

    Raises CheckpointError for a missing part, no files, or files of another number of ranks.
    """
    parts = parts_of_rank(folder, pattern, parallel.rank)
    if not parts:
        # Of other ranks there may be some.
        _check_arrangement(parts_of_rank(folder, pattern, 0).values(), parallel)
        present = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        wanted = pattern.format(rank=parallel.rank, part=0)
        raise CheckpointError(f"There is no {wanted} (load_format='sharded_state'). The folder holds {present}.")
    _check_arrangement(parts.values(), parallel)
    num_parts = max(parts) + 1
    for number, path in parts.items():
        with opened(path) as file:
            metadata = file.metadata() or {}
        saved_parts = _number_of_parts(path, metadata.get("num_parts", str(num_parts)))
        if number >= saved_parts:
            raise CheckpointError(
                f"{path} is part {number} of a state of {saved_parts} parts, so it belongs to another state. Remove it."
            )
        num_parts = max(num_parts, saved_parts)
    num_missing = num_parts - len(parts)
    if num_missing:
        # Not all parts that a file name claims, which may be many.
        first = islice((part for part in range(num_parts) if part not in parts), _SHOWN)
        names = ", ".join(pattern.format(rank=parallel.rank, part=part) for part in first)
        count = f" and others ({num_missing:,} in all)" if num_missing > _SHOWN else ""
        raise CheckpointError(f"{folder} lacks {names}{count} of {num_parts} parts. Save the state again.")
    return WeightFiles(tuple(parts[number] for number in sorted(parts)))


def find_packed_state(
    folder: Path, load_config: LoadConfig, parallel: ParallelState
) -> PackedFiles | TensorizedState | None:
    """Return this rank's packed state; None for another load format, or a sharded state of floats.

    Raises CheckpointError for missing or damaged files.
    """
    if load_config.load_format == TENSORIZER:
        return TensorizedState.open(load_config.tensorizer_uri or default_uri(folder), parallel)
    if load_config.load_format != SHARDED_STATE:
        return None
    files = find_sharded_files(folder, load_config.sharded_state_pattern, parallel)
    header = read_header(files)
    return None if header is None else PackedFiles(files, header)


def _check_arrangement(paths: Iterable[Path], parallel: ParallelState) -> None:
    for path in paths:
        with opened(path) as file:
            check_arrangement(path, file.metadata() or {}, parallel)


def _number_of_parts(path: Path, written: str) -> int:
    if not re.fullmatch("[0-9]{1,19}", written):
        raise damaged(path, f"its metadata has num_parts={shown(written)}, which must be a number of files")
    return int(written)


def _write_parts(
    tensors: Mapping[str, Tensor],
    folder: Path,
    parallel: ParallelState,
    pattern: str,
    max_size: int | None,
    more: Mapping[str, str],
) -> list[Path]:
    """more: metadata beside that of ranks and parts."""
    parts = list(_cut(tensors, max_size))
    written: list[Path] = []
    for number, names in enumerate(parts):
        path = folder / pattern.format(rank=parallel.rank, part=number)
        metadata = {
            "format": "pt",
            "rank": str(parallel.rank),
            **{name: str(size) for name, size in sizes_of(parallel).items()},
            "num_parts": str(len(parts)),
        }
        try:
            write_tensors(path, {name: tensors[name] for name in names}, {**metadata, **more})
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error}. Its parts before it are complete.") from error
        written.append(path)
    return written


def _cut(tensors: Mapping[str, Tensor], max_size: int | None) -> Iterator[list[str]]:
    """Split the names, in order, into files of at most this size."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if names and max_size is not None and size + num_bytes > max_size:
            yield names
            names, size = [], 0
        names.append(name)
        size += num_bytes
    if names:
        yield names
