"""Weights from GGUF files, under the names and in the layout of Transformers' checkpoints."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.checkpoints.gguf.container import TensorInfo, models_in, parts_of, read_header, read_headers
from penstock.checkpoints.gguf.fields import Metadata
from penstock.checkpoints.gguf.folder import encoder_in
from penstock.config import LoadConfig
from penstock.errors import CheckpointError
from penstock.layers.weights import Part
from penstock.loader.gguf.blocks import check_layout, map_tensors
from penstock.loader.gguf.changes import Change, concatenated
from penstock.loader.gguf.encoder_names import encoder_names_of
from penstock.loader.gguf.grids import BlockGrid
from penstock.loader.gguf.lazy import JoinedTensor, LazyTensor, part_of
from penstock.loader.gguf.names import TensorNames, names_of
from penstock.loader.quantized.grid import Grid, join_grids
from penstock.loader.weight_files import has_weight_files
from penstock.parallel import Share

logger = logging.getLogger(__name__)
_Place = tuple[TensorInfo, int | None]


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """Weights of one model. tensors: descriptions, checked against the files.

    places: tensors of each weight, with the index in its first dimension if it is one of several experts'.
    """

    tensors: tuple[TensorInfo, ...]
    names: TensorNames
    places: Mapping[str, Sequence[_Place]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        places: dict[str, list[_Place]] = {}
        for info in self.tensors:
            name = self.names.of(info.name).name(info.name) or info.name
            if "*" not in name:
                places.setdefault(name, []).append((info, None))
                continue
            for index in range(info.shape[0] if info.shape else 0):
                places.setdefault(name.replace("*", str(index)), []).append((info, index))
        object.__setattr__(self, "places", places)

    @classmethod
    def find(cls, folder: Path) -> GgufWeights | None:
        """Find the GGUF model of a folder, which may be a link; None without one.

        Raises CheckpointError for a damaged file, or several models.
        """
        found = models_in(folder)
        if not found:
            return None
        if len(found) > 1:
            raise CheckpointError(
                f"{folder} holds several GGUF models: {', '.join(path.name for path in found)}. Give the path of one."
            )
        # Errors name the file itself.
        header = read_headers([path.resolve() for path in parts_of(found[0])])
        check_layout(header.tensors)
        names, stored = names_of(Metadata(str(found[0].resolve()), header)), header.tensors
        encoder = encoder_in(folder)
        if encoder is not None:
            header = read_header(encoder.resolve())
            check_layout(header.tensors)
            names = replace(names, encoder=encoder_names_of(Metadata(str(encoder.resolve()), header)))
            stored += header.tensors
        tensors = [names.of(tensor.name).shaped(tensor) for tensor in stored]
        return cls(tuple(tensor for tensor in tensors if names.of(tensor.name).name(tensor.name) is not None), names)

    def log_types(self) -> None:
        """Log how many tensors are of each type, and what becomes of them."""
        stored = list(map_tensors(self.tensors))
        kinds = Counter(tensor.type_name for tensor in stored)
        if any(tensor.is_quantized for tensor in stored):
            logger.info(
                "GGUF: tensors of the types %s", ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
            )

    @property
    def quantized_names(self) -> list[str]:
        """Names of the quantised tensors."""
        quantized = {tensor.info.name for tensor in map_tensors(self.tensors) if tensor.is_quantized}
        return [name for name, places in self.places.items() if any(info.name in quantized for info, _ in places)]

    def grid(self, name: str, part: Part | None = None) -> BlockGrid | None:
        """Grid of a tensor, or of a rank's part of it, with the outputs first; None without one.

        part: in the layout of Transformers. Raises Indivisible if it splits groups.
        """
        places = self.places[name]
        if len(places) == 1:
            return self._grid_at(places[0], name, part)
        names = self.names.of(places[0][0].name)
        if names.join(name) is not concatenated or (part is not None and part.dim != 0):
            return None
        grids, begin = [], 0
        for place in sorted(places, key=lambda place: names.order(place[0].name)):
            size = place[0].shape[0]
            shares = [Share(0, size, size)] if part is None else _within(part.shares, begin, size)
            grids += [self._grid_at(place, name, Part(0, (share,))) for share in shares]
            begin += size
        found = [grid for grid in grids if grid is not None]
        if len(found) < len(grids) or len({grid.type for grid in found}) != 1:
            return None
        return replace(found[0], grid=join_grids([grid.grid for grid in found], [name] * len(found)))

    def _grid_at(self, place: _Place, name: str, part: Part | None) -> BlockGrid | None:
        """Grid of one tensor of the file, or of a part of it."""
        info, index = place
        (stored,) = map_tensors([info])
        stored = stored if index is None else stored.at(index)
        change = self.names.of(stored.info.name).change(stored.info.name)
        if part is None:
            return _changed(stored.grid(), change)
        dim = change.stored_dim(part.dim)
        grids: list[Grid] = []
        found: BlockGrid | None = None
        for share in part.shares:
            covering, start = part_of(stored, change, dim, share)
            found = _changed(covering.grid(), change)
            if found is None:
                return None
            within = Part(dim, (Share(start, share.size, covering.shape[dim]),))
            grids.append(found.grid.of(within, name))
        return None if found is None else replace(found, grid=join_grids(grids, [name] * len(grids)))

    def iterate(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the weights by name: tensors that are read when they are used, quantised ones as float32."""
        mapped = {tensor.info.name: tensor for tensor in map_tensors(self.tensors)}
        for name, places in self.places.items():
            stored = [mapped[info.name] if index is None else mapped[info.name].at(index) for info, index in places]
            names = self.names.of(stored[0].info.name)
            if len(stored) == 1:
                yield name, LazyTensor(stored[0], names.change(stored[0].info.name))
            else:
                parts = sorted(stored, key=lambda tensor: names.order(tensor.info.name))
                yield name, JoinedTensor(parts, names.join(name))

    def iterate_without_memory(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over meta tensors of the weights, by name, without reading the files' blocks."""
        for name, tensor in self.iterate():
            yield name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _within(shares: Sequence[Share], begin: int, size: int) -> list[Share]:
    """Shares of joined rows that are of the tensor with `size` rows from `begin` on, counted in it."""
    return [Share(share.start - begin, share.size, size) for share in shares if begin <= share.start < begin + size]


def _changed(found: BlockGrid | None, change: Change) -> BlockGrid | None:
    if found is None:
        return None
    minimums_OG = found.grid.minimums_OG
    grid = replace(
        found.grid,
        scales_OG=change.of_grid(found.grid.scales_OG),
        minimums_OG=None if minimums_OG is None else change.of_grid(minimums_OG),
    )
    return replace(found, grid=grid)


def find_gguf(folder: Path, load_config: LoadConfig) -> GgufWeights | None:
    """GGUF model of a folder, if it is asked for, or the only one there."""
    is_wanted = load_config.load_format == "gguf" or (
        load_config.load_format == "auto" and not has_weight_files(folder)
    )
    return GgufWeights.find(folder) if is_wanted else None
