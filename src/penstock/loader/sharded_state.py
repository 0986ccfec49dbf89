"""Sharded state: each rank's weights on disk as they are in memory, without splitting or fusing at load.

Names are the model's parameter names, not the checkpoint's; files belong to one rank. Quantised weights are a packed
state (`packed_state`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torch import Tensor, nn

from penstock.checkpoints.json_file import shown
from penstock.config import LoadConfig
from penstock.config.load import SHARDED_STATE, SHARDED_STATE_PATTERN, TENSORIZER, check_sharded_state_pattern
from penstock.errors import CheckpointError, ConfigError
from penstock.layers.linear import process_weights_after_loading, restore_weights
from penstock.layers.weights import WeightSlot
from penstock.loader.arrangement import SAVE_ID, Arrangement
from penstock.loader.kv_cache_scales import scales_of_state
from penstock.loader.packed_files import PackedFiles, metadata_of, read_header, write_tensors
from penstock.loader.packed_header import PackedHeader
from penstock.loader.packed_state import PackedState
from penstock.loader.resharding import SavedRanks
from penstock.loader.safetensors import opened
from penstock.loader.tensorized import TensorizedState, default_uri, open_tensorized
from penstock.loader.weight_files import WeightFiles, damaged, first_parts, parts_of_rank
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
    save_id: str | None = None,
) -> list[Path]:
    """Write this rank's state into files of at most `max_size` bytes (at least one tensor each); None: one file.

    packed: of a quantised model; None writes parameters of floats, which are unpacked meanwhile, so no step may run.
    save_id: as of `new_save_id`; None leaves it out.
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
    of_save = {} if save_id is None else {SAVE_ID: save_id}
    if packed is not None:
        return _write_parts(packed.tensors, folder, parallel, pattern, max_size, of_save | metadata_of(packed))
    restore_weights(model)
    try:
        tensors = {name: slot.target.detach() for name, slot in state_slots(model).items()} | scales_of_state(model)
        return _write_parts(tensors, folder, parallel, pattern, max_size, of_save)
    finally:
        process_weights_after_loading(model)


def copy_model_files(source: Path, target: Path) -> None:
    """Copy a model folder's other files (configuration, tokenizer) to the target; keeps existing files."""
    for path in source.iterdir():
        is_wanted = path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHT_SUFFIXES)
        if is_wanted and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


@dataclass(frozen=True, slots=True)
class StateFiles:
    """Files of a saved state. ranks: of this rank alone; of all ranks where the state has another arrangement of them.

    arrangement: of the state. is_other: whether it is another one than the engine's.
    """

    arrangement: Arrangement
    ranks: Sequence[WeightFiles]
    is_other: bool

    @property
    def of_names(self) -> WeightFiles:
        """Files that have all tensors of the model by name, as whole tensors or as shares."""
        first = self.ranks[:: self.arrangement.tensor_parallel_size] if self.is_other else self.ranks
        return WeightFiles(tuple(path for files in first for path in files.paths))


@dataclass(frozen=True, slots=True)
class RankFiles:
    """States of all ranks of another arrangement, in files."""

    arrangement: Arrangement
    ranks: Sequence[PackedFiles | TensorizedState]

    @property
    def header(self) -> PackedHeader | None:
        """The first rank's header."""
        return self.ranks[0].header

    def read(self) -> SavedRanks:
        return SavedRanks(self.arrangement, [one.read() for one in self.ranks])

    def peek(self) -> SavedRanks:
        """The states with meta tensors."""
        return SavedRanks(self.arrangement, [one.peek() for one in self.ranks])


def find_sharded_files(folder: Path, pattern: str, parallel: ParallelState) -> StateFiles:
    """Return the files of a saved state, in order.

    Raises CheckpointError for a missing part, no files, or files of different arrangements of ranks, or of different
    saves.
    """
    here = Arrangement.of(parallel)
    # A state of fewer ranks has no files of this one.
    known = next((found for rank in (parallel.rank, 0) if (found := parts_of_rank(folder, pattern, rank))), None)
    if known is None:
        present = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        wanted = pattern.format(rank=parallel.rank, part=0)
        raise CheckpointError(f"There is no {wanted} (load_format='sharded_state'). The folder holds {present}.")
    saved = _arrangement_of(next(iter(known.values())), here)
    is_other = saved != here
    ranks = range(saved.num_ranks) if is_other else (parallel.rank,)
    files = [_files_of_rank(folder, pattern, rank, saved) for rank in ranks]
    # Others are on this machine too, unless each has its own files alone.
    _check_of_one_save([*(path for one in files for path in one.paths), *first_parts(folder, pattern)])
    return StateFiles(saved, files, is_other)


def _check_of_one_save(paths: Sequence[Path]) -> None:
    """Raise CheckpointError for files of different saves; those of older versions do not say theirs."""
    ids: dict[Path, str | None] = {}
    for path in dict.fromkeys(paths):
        with opened(path, framework="np") as file:
            ids[path] = (file.metadata() or {}).get(SAVE_ID)
    first = paths[0]
    other = next((path for path, save_id in ids.items() if save_id != ids[first]), None)
    if other is not None:
        raise CheckpointError(
            f"{other} is of another save than {first.name}: it has {SAVE_ID}={shown(ids[other])}, and {first.name} has "
            f"{shown(ids[first])}. Copy the files of all ranks of one save_sharded_state into an empty folder."
        )


def _files_of_rank(folder: Path, pattern: str, rank: int, arrangement: Arrangement) -> WeightFiles:
    """Files of one rank, in order."""
    parts = parts_of_rank(folder, pattern, rank)
    if not parts:
        raise CheckpointError(
            f"{folder} lacks {pattern.format(rank=rank, part=0)}, the share of rank {rank} of a state that was saved "
            f"with {arrangement}. Engines with another arrangement need the files of all ranks: copy them there."
        )
    num_parts = max(parts) + 1
    for number, path in parts.items():
        other = _arrangement_of(path, arrangement)
        if other != arrangement:
            raise CheckpointError(
                f"{path} was saved with {other}, and other files of the folder with {arrangement}. Remove those that "
                "do not belong to the state."
            )
        with opened(path) as file:
            metadata = file.metadata() or {}
        if (saved_rank := metadata.get("rank", str(rank))) != str(rank):
            raise CheckpointError(
                f"{path} has the share of rank {shown(saved_rank)}, and its name says rank {rank}. Copy the files of "
                "all ranks again, each with its own name."
            )
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
        names = ", ".join(pattern.format(rank=rank, part=part) for part in first)
        count = f" and others ({num_missing:,} in all)" if num_missing > _SHOWN else ""
        raise CheckpointError(f"{folder} lacks {names}{count} of {num_parts} parts. Save the state again.")
    return WeightFiles(tuple(parts[number] for number in sorted(parts)))


def find_state(
    folder: Path, load_config: LoadConfig, parallel: ParallelState
) -> PackedFiles | TensorizedState | RankFiles | None:
    """Return the saved state of this rank, or those of all ranks of another arrangement; None for other load formats.

    A state of floats has no header. Raises CheckpointError for missing or damaged files.
    """
    if load_config.load_format == TENSORIZER:
        uri = load_config.tensorizer_uri or default_uri(folder)
        return _state_of(*open_tensorized(uri, parallel))
    if load_config.load_format != SHARDED_STATE:
        return None
    files = find_sharded_files(folder, load_config.sharded_state_pattern, parallel)
    return _state_of(files.arrangement, [PackedFiles(one, read_header(one)) for one in files.ranks], files.is_other)


def find_packed_state(
    folder: Path, load_config: LoadConfig, parallel: ParallelState
) -> PackedFiles | TensorizedState | RankFiles | None:
    """Return the packed state of `find_state`; None for a sharded state of floats too."""
    found = find_state(folder, load_config, parallel)
    return found if found is not None and found.header is not None else None


def _state_of(
    arrangement: Arrangement, ranks: Sequence[PackedFiles | TensorizedState], is_other: bool
) -> PackedFiles | TensorizedState | RankFiles:
    return RankFiles(arrangement, ranks) if is_other else ranks[0]


def _arrangement_of(path: Path, here: Arrangement) -> Arrangement:
    with opened(path) as file:
        return Arrangement.said_by(path, file.metadata() or {}, here)


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
            **Arrangement.of(parallel).header(),
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
