"""Arrangement of the ranks that have shares of a model, as saved states say it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoints.json_file import shown
from penstock.errors import CheckpointError
from penstock.loader.tensor_parallel_sizes import UnjoinedGroup
from penstock.parallel import ParallelState

_TENSOR, _PIPELINE, _WORLD, _LAYERS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "world_size",
    "pipeline_layers",
)
# Field of a file's header: the id of the save, which all ranks have in common.
SAVE_ID = "save_id"
_NUMBER = re.compile("[1-9][0-9]{0,5}")


def new_save_id(parallel: ParallelState) -> str:
    """Return a random id for a save, which all ranks get that call this together.

    Engines of torchrun have a front end per rank, so that no call could bring it.
    """
    save_id = secrets.token_hex(8)
    for group in (parallel.tensor, parallel.pipeline):
        save_id = group.gather_values(save_id, str)[0]
    return save_id


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Sizes of the groups, and the layers of each pipeline stage; None where they are spread evenly."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    pipeline_layers: tuple[int, ...] | None = None

    @classmethod
    def of(cls, parallel: ParallelState) -> Arrangement:
        return cls(parallel.tensor.size, parallel.pipeline.size, parallel.pipeline_layers)

    @classmethod
    def said_by(cls, path: Path | str, saved: Mapping[str, object], here: Arrangement) -> Arrangement:
        """Read the arrangement from a file's header; what an older header lacks is as here.

        Raises CheckpointError for values that are none.
        """
        known = here.header()
        said = {name: str(saved.get(name, value)) for name, value in known.items()}
        tensor, pipeline, world = said[_TENSOR], said[_PIPELINE], said[_WORLD]
        layers = said[_LAYERS].split(",") if said[_LAYERS] else []
        are_numbers = all(_NUMBER.fullmatch(number) for number in (tensor, pipeline, world, *layers))
        if not are_numbers or int(tensor) * int(pipeline) != int(world) or len(layers) not in (0, int(pipeline)):
            given = ", ".join(f"{name}={shown(value)}" for name, value in said.items())
            raise CheckpointError(
                f"{path} says of the engine that saved it: {given}, which is no arrangement of ranks. Save it again."
            )
        return cls(int(tensor), int(pipeline), tuple(map(int, layers)) or None)

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def header(self) -> dict[str, str]:
        """Fields of a file's header."""
        return {
            _TENSOR: str(self.tensor_parallel_size),
            _PIPELINE: str(self.pipeline_parallel_size),
            _WORLD: str(self.num_ranks),
            _LAYERS: ",".join(map(str, self.pipeline_layers or ())),
        }

    def ranks(self) -> list[ParallelState]:
        """Parallel states of all ranks, to build models for; collectives cannot run."""
        size = self.tensor_parallel_size
        return [
            ParallelState(
                rank=rank,
                world_size=self.num_ranks,
                tensor=UnjoinedGroup(size, rank % size),
                pipeline=UnjoinedGroup(self.pipeline_parallel_size, rank // size),
                pipeline_layers=self.pipeline_layers,
            )
            for rank in range(self.num_ranks)
        ]

    def __str__(self) -> str:
        layers = "" if self.pipeline_layers is None else f", {_LAYERS}={','.join(map(str, self.pipeline_layers))}"
        return f"{_TENSOR}={self.tensor_parallel_size}, {_PIPELINE}={self.pipeline_parallel_size}{layers}"
