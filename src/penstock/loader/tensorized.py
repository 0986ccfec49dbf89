"""Packed states in files of the package tensorizer, one per rank. The header is a tensor of bytes among the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoints.json_file import shown
from penstock.device.operator_sizes import META
from penstock.errors import CheckpointError, ConfigError, UnsupportedFeature
from penstock.loader.arrangement import Arrangement
from penstock.loader.packed_state import PackedState
from penstock.parallel import ParallelState

_HEADER, _FORMS, _RANK = "penstock_packed_state", "tensors", "rank"
_PATTERN = "model-rank-%03d.tensors"


@dataclass(frozen=True, slots=True)
class TensorizedState:
    """header: as of `PackedState`, with dtype and shape of each tensor."""

    uri: str
    header: Mapping[str, Any]

    @classmethod
    def open(cls, uri: str, rank: int, here: Arrangement) -> tuple[TensorizedState, Arrangement]:
        """Read the header of a rank's file; return the state, and the arrangement of ranks that it is of.

        Raises CheckpointError for a missing or damaged file, and for one of another rank.
        """
        path = _of_rank(uri, rank)
        found = _read(path, lambda name: name == _HEADER)
        if _HEADER not in found:
            raise CheckpointError(f"{path} was not written by save_tensorized_model. Save the model with it.")
        header = _header_in(path, found[_HEADER])
        if (saved_rank := header.get(_RANK, rank)) != rank:
            raise CheckpointError(
                f"{path} has the share of rank {shown(saved_rank)}, and its name says rank {rank}. Copy the files of "
                "all ranks again, each with its own name."
            )
        return cls(path, header), Arrangement.said_by(path, header, here)

    def read(self) -> PackedState:
        tensors = _read(self.uri, lambda name: name != _HEADER)
        return PackedState(self.header, tensors)

    def peek(self) -> PackedState:
        """The state with meta tensors."""
        forms = self.header[_FORMS].items()
        return PackedState(
            self.header,
            {name: torch.empty(shape, dtype=getattr(torch, dtype), device=META) for name, (dtype, shape) in forms},
        )


def open_tensorized(uri: str, parallel: ParallelState) -> tuple[Arrangement, list[TensorizedState], bool]:
    """Open this rank's file, or those of all ranks of another arrangement.

    Returns the arrangement of the files, and whether it is another one than the engine's. Raises CheckpointError for a
    missing or damaged file, and for files of different arrangements.
    """
    here = Arrangement.of(parallel)
    try:
        state, saved = TensorizedState.open(uri, parallel.rank, here)
    except CheckpointError:
        # A state of fewer ranks has none of this one.
        if parallel.rank == 0:
            raise
        state, saved = TensorizedState.open(uri, 0, here)
        if saved == here:
            raise
    _check_for_ranks(uri, saved.num_ranks)
    if saved == here:
        return saved, [state], False
    states = []
    for rank in range(saved.num_ranks):
        state, other = TensorizedState.open(uri, rank, saved)
        if other != saved:
            raise CheckpointError(
                f"{state.uri} was saved with {other}, and other ranks with {saved}. Save the model again."
            )
        states.append(state)
    return saved, states, True


def write_tensorized(state: PackedState, uri: str, parallel: ParallelState) -> str:
    """Write this rank's file; return its name. Raises CheckpointError if it cannot be written."""
    _check_for_ranks(uri, parallel.world_size)
    path = _of_rank(uri, parallel.rank)
    forms = {name: (str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in state.tensors.items()}
    header = {**state.header, **Arrangement.of(parallel).header(), _RANK: parallel.rank, _FORMS: forms}
    written = torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8)
    tensorizer = _tensorizer()
    try:
        serializer = tensorizer.TensorSerializer(path)
        serializer.write_state_dict({**state.tensors, _HEADER: written})
        serializer.close()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}.") from error
    return path


def uri_of(tensorizer_config: Any) -> str:
    """The address in a configuration of tensorizer. Raises ConfigError without one."""
    found = tensorizer_config
    if not isinstance(found, str):
        found = found.get("tensorizer_uri") if isinstance(found, Mapping) else getattr(found, "tensorizer_uri", None)
    if not isinstance(found, str) or not found:
        raise ConfigError(
            f"tensorizer_config={tensorizer_config!r} is not valid. Allowed: a path or an address, or a dictionary "
            "with it as tensorizer_uri."
        )
    return found


def default_uri(folder: Path) -> str:
    """The file that is taken without `tensorizer_uri`."""
    return str(folder / _PATTERN)


def _header_in(path: str, written: Tensor) -> dict[str, Any]:
    """Decode the header of a file. Raises CheckpointError for one that is no JSON object."""
    with suppress(ValueError, RecursionError):
        header = json.loads(bytes(written.tolist()))
        if isinstance(header, dict):
            return header
    raise CheckpointError(f"{path} is damaged: its {_HEADER} is no JSON object. Save the model again.")


def _of_rank(uri: str, rank: int) -> str:
    """Put a rank in the place of %03d, if there is one."""
    try:
        return uri % rank if "%" in uri else uri
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tensorizer_uri={uri!r} is not valid: {error}. Allowed: one %03d.") from error


def _check_for_ranks(uri: str, num_ranks: int) -> None:
    """Raise ConfigError for one file for several ranks."""
    if num_ranks > 1 and "%" not in uri:
        raise ConfigError(f"tensorizer_uri={uri!r} is one file for {num_ranks} ranks. Add %03d for the rank.")


def _read(path: str, is_wanted: Any) -> dict[str, Tensor]:
    tensorizer = _tensorizer()
    try:
        with tensorizer.TensorDeserializer(path, device="cpu", filter_func=is_wanted, verify_hash=False) as file:
            return dict(file.items())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read by tensorizer: {error}. Save the model again.") from error


def _tensorizer() -> ModuleType:
    try:
        import tensorizer
    except ImportError as error:
        raise UnsupportedFeature(
            f"load_format='tensorizer' and save_tensorized_model need the package tensorizer: {error}. Install it: "
            "pip install 'penstock[tensorizer]'."
        ) from error
    found: ModuleType = tensorizer
    return found
