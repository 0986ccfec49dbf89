"""Packed states in files of the package tensorizer, one per rank. The header is a tensor of bytes among the others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from penstock.checkpoints.json_file import shown
from penstock.device.operator_sizes import META
from penstock.errors import CheckpointError, ConfigError, UnsupportedFeature
from penstock.loader.arrangement import SAVE_ID, Arrangement
from penstock.loader.packed_header import HEADER, PackedHeader, checked, checked_header, decode_object
from penstock.loader.packed_state import PackedState
from penstock.parallel import ParallelState

_PATTERN = "model-rank-%03d.tensors"


class _Form(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Dtype, as torch names it, and shape of a tensor."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]

    @property
    def torch_dtype(self) -> object:
        return getattr(torch, self.dtype, None)


class _OfRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of a file's header beside those of a packed state. tensors: a `_Form` by name. Others: older files lack
    them; those of the arrangement are texts.
    """

    tensors: dict[str, Any]
    rank: int | msgspec.UnsetType = msgspec.UNSET
    tensor_parallel_size: str | msgspec.UnsetType = msgspec.UNSET
    pipeline_parallel_size: str | msgspec.UnsetType = msgspec.UNSET
    world_size: str | msgspec.UnsetType = msgspec.UNSET
    pipeline_layers: str | msgspec.UnsetType = msgspec.UNSET
    save_id: str | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class TensorizedState:
    """A packed state in a file. forms: dtype and shape of each tensor. save_id: None in files of older versions."""

    uri: str
    header: PackedHeader
    forms: Mapping[str, _Form]
    save_id: str | None

    @classmethod
    def open(cls, uri: str, rank: int, here: Arrangement) -> tuple[TensorizedState, Arrangement]:
        """Read the header of a rank's file; return the state, and the arrangement of ranks that it is of.

        Raises CheckpointError for a missing or damaged file, and for one of another rank.
        """
        path = _of_rank(uri, rank)
        found = _read(path, lambda name: name == HEADER)
        if HEADER not in found:
            raise CheckpointError(f"{path} was not written by save_tensorized_model. Save the model with it.")
        content = decode_object(path, bytes(found[HEADER].tolist()))
        names = _OfRank.__struct_fields__
        own = checked(path, {name: value for name, value in content.items() if name in names}, _OfRank)
        if own.rank not in (rank, msgspec.UNSET):
            raise CheckpointError(
                f"{path} has the share of rank {own.rank}, and its name says rank {rank}. Copy the files of all ranks "
                "again, each with its own name."
            )
        header = checked_header(path, {name: value for name, value in content.items() if name not in names})
        forms = {name: checked(path, form, _Form, f"tensors.{name}") for name, form in own.tensors.items()}
        for name, form in forms.items():
            if not isinstance(form.torch_dtype, torch.dtype):
                raise CheckpointError(
                    f"{path} is damaged: its {HEADER} has tensors.{name}[0]={shown(form.dtype)}, which is no dtype of "
                    "torch. Save the model again."
                )
        save_id = None if isinstance(own.save_id, msgspec.UnsetType) else own.save_id
        return cls(path, header, forms, save_id), Arrangement.said_by(path, msgspec.to_builtins(own), here)

    def read(self) -> PackedState:
        tensors = _read(self.uri, lambda name: name != HEADER)
        read, said = ({name: (one.dtype, list(one.shape)) for name, one in of.items()} for of in (tensors, self._metas))
        if differing := sorted(name for name in read.keys() | said.keys() if read.get(name) != said.get(name)):
            raise CheckpointError(
                f"{self.uri} is damaged: its tensors are others than its {HEADER} has, such as {differing[0]} "
                f"({len(differing)} in all). Save the model again."
            )
        return PackedState(self.header, tensors)

    def peek(self) -> PackedState:
        """The state with meta tensors."""
        return PackedState(self.header, self._metas)

    @property
    def _metas(self) -> dict[str, Tensor]:
        return {
            name: torch.empty(form.shape, dtype=form.torch_dtype, device=META)  # type: ignore[call-overload]
            for name, form in self.forms.items()
        }


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
        if parallel.rank > 0:
            first = state
            with suppress(CheckpointError):  # on another machine, or reported by its own rank
                first, _ = TensorizedState.open(uri, 0, saved)
            _check_of_one_save(first, state)
        return saved, [state], False
    states: list[TensorizedState] = []
    for rank in range(saved.num_ranks):
        state, other = TensorizedState.open(uri, rank, saved)
        if other != saved:
            raise CheckpointError(
                f"{state.uri} was saved with {other}, and other ranks with {saved}. Save the model again."
            )
        states.append(state)
        _check_of_one_save(states[0], state)
    return saved, states, True


def _check_of_one_save(first: TensorizedState, other: TensorizedState) -> None:
    if other.save_id != first.save_id:
        raise CheckpointError(
            f"{other.uri} is of another save than {first.uri}: it has {SAVE_ID}={shown(other.save_id)}, and the other "
            f"has {shown(first.save_id)}. Take the files of all ranks of one save_tensorized_model."
        )


def write_tensorized(state: PackedState, uri: str, parallel: ParallelState, save_id: str | None = None) -> str:
    """Write this rank's file; return its name. save_id: as of `new_save_id`; None leaves it out.

    Raises CheckpointError if it cannot be written.
    """
    _check_for_ranks(uri, parallel.world_size)
    path = _of_rank(uri, parallel.rank)
    tensorizer = _tensorizer()
    assert state.header is not None, "of packed weights"
    forms = {name: _Form(str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in state.tensors.items()}
    of_save = {} if save_id is None else {SAVE_ID: save_id}
    own = _OfRank(forms, parallel.rank, **Arrangement.of(parallel).header(), **of_save)
    header = msgspec.json.encode({**msgspec.to_builtins(state.header), **msgspec.to_builtins(own)})
    written = torch.tensor(list(header), dtype=torch.uint8)
    try:
        serializer = tensorizer.TensorSerializer(path)
        serializer.write_state_dict({**state.tensors, HEADER: written})
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
