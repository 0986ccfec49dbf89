"""Ways by which a trainer's tensors reach a worker."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.weight_transfer import WeightTransferConfig
from penstock.errors import CheckpointError, ConfigError, LifecycleError
from penstock.loader.safetensors import check_safetensors, iterate_safetensors
from penstock.loader.weight_files import SAFETENSORS, WeightFiles, find_weight_files
from penstock.parallel.stateless_group import PyNcclCommunicator
from penstock.parallel.weight_stream import join, receive

# Alignment of tensors in shared memory.
ALIGNMENT = 64
_NOT_READY = "The workers have not joined a trainer. Call init_weight_transfer_engine first."


class Backend(ABC):
    """A way to a trainer. device: of the worker. rank: among all workers of all engines."""

    def __init__(self, options: WeightTransferConfig, device: torch.device, rank: int) -> None:
        self._options, self._device, self._rank = options, device, rank

    def init(self, init_info: Mapping[str, Any]) -> None:  # noqa: B027 - some need no rendezvous
        """Join the trainer; waits for it. Raises ConfigError for a field that is not valid."""

    @abstractmethod
    def receive(self, update_info: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Iterate over tensors that the trainer sends, valid until the next one is asked for; waits for each.

        Raises ConfigError for a field that is not valid before the first one is asked for.
        """

    def close(self) -> None:  # noqa: B027 - some hold nothing
        """Leave the trainer, which ends waits for it; idempotent."""


class GroupBackend(Backend):
    """A group of the trainer (rank 0) and all workers, over gloo or NCCL; the trainer broadcasts buckets of tensors."""

    _communicator: PyNcclCommunicator | None = None
    _is_packed = False

    def init(self, init_info: Mapping[str, Any]) -> None:
        self.close()
        offset = _field(init_info, "rank_offset", int, 1)
        self._is_packed = bool(init_info.get("packed", False))
        self._communicator = join(init_info, offset + self._rank, self._device, self._options.timeout_s)

    def receive(self, update_info: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        if self._communicator is None:
            raise LifecycleError(_NOT_READY)
        names, dtypes, shapes = _announced(update_info)
        packed = bool(update_info.get("packed", self._is_packed))
        return zip(names, receive(self._communicator, dtypes, shapes, packed=packed), strict=True)

    def close(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()


class SharedMemoryBackend(Backend):
    """Memory that the trainer shares as a file, such as one in /dev/shm, with the tensors one behind the other."""

    def receive(self, update_info: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        names, dtypes, shapes = _announced(update_info)
        path = Path(_field(update_info, "path", str))
        places = places_of([math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)])
        size = places[-1] if places else 0
        try:
            present = os.stat(path).st_size
        except OSError as error:
            raise ConfigError(f"path={str(path)!r} of update_info cannot be read: {error.strerror}.") from error
        if present < size:
            raise ConfigError(f"path={str(path)!r} of update_info has {present:,} bytes. The tensors need {size:,}.")
        memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        return (
            (name, memory[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape)))
            for name, begin, dtype, shape in zip(names, places, dtypes, shapes, strict=False)
        )


class FilesBackend(Backend):
    """Safetensors files: a folder with a checkpoint, or a list of files."""

    def receive(self, update_info: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        given = update_info.get("path", update_info.get("paths"))
        paths = [given] if isinstance(given, str) else given
        if not isinstance(paths, Sequence) or not paths or not all(isinstance(one, str) for one in paths):
            raise ConfigError(
                f"update_info={dict(update_info)} is not valid. Needed: path, a folder, or paths of files."
            )
        found = [Path(path) for path in paths]
        if len(found) == 1 and found[0].is_dir():
            files = find_weight_files(found[0], SAFETENSORS)
            if files is None:
                raise CheckpointError(f"{found[0]} has no safetensors files.")
        else:
            missing = next((path for path in found if not path.is_file()), None)
            if missing is not None:
                raise ConfigError(f"{str(missing)!r} of update_info is not a file.")
            files = WeightFiles(tuple(found))
        check_safetensors(files)
        return iterate_safetensors(files)


_BACKENDS: dict[str, type[GroupBackend] | type[SharedMemoryBackend] | type[FilesBackend]] = {
    "gloo": GroupBackend,
    "nccl": GroupBackend,
    "ipc": SharedMemoryBackend,
    "files": FilesBackend,
}


def create_backend(options: WeightTransferConfig, device: torch.device, rank: int) -> Backend:
    """Create the backend of an engine with a trainer. Raises ConfigError without one."""
    if options.backend is None:
        raise ConfigError(
            "weight transfers are not enabled in this engine. Start the engine with weight_transfer_config, such as "
            "{'backend': 'gloo'}."
        )
    return _BACKENDS[options.backend](options, device, rank)


def places_of(sizes: Sequence[int]) -> list[int]:
    """Offsets of tensors of these sizes in shared memory, and the size of all."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return places


def _announced(update_info: Mapping[str, Any]) -> tuple[list[str], list[torch.dtype], list[list[int]]]:
    """Names, dtypes and shapes of the tensors of an update."""
    names, shapes = _field(update_info, "names", list), _field(update_info, "shapes", list)
    dtype_names = _field(update_info, "dtype_names", list)
    if not len(names) == len(dtype_names) == len(shapes):
        raise ConfigError(
            f"update_info has {len(names)} names, {len(dtype_names)} dtype_names and {len(shapes)} shapes. Each tensor "
            "needs one of each."
        )
    dtypes = [getattr(torch, str(name).removeprefix("torch."), None) for name in dtype_names]
    wrong = next(
        (name for name, one in zip(dtype_names, dtypes, strict=True) if not isinstance(one, torch.dtype)), None
    )
    if wrong is not None:
        raise ConfigError(f"dtype_names of update_info has {wrong!r}, which is no dtype of torch.")
    return names, dtypes, shapes  # type: ignore[return-value]


def _field(info: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = info.get(name, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not valid. Needed: {kind.__name__}.")
    return value
