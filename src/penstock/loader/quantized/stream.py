"""Quantised checkpoints read as float tensors, with the grids that restore their integers after loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from penstock.checkpoints.quantized_checkpoint import QuantizedCheckpoint
from penstock.errors import CheckpointError, UnsupportedFeature
from penstock.layers.linear import LinearLayer
from penstock.layers.quantization.method import QuantizedMethod, ReorderedMethod
from penstock.loader.quantized.assembly import Piece
from penstock.loader.quantized.formats import format_of
from penstock.loader.quantized.grid import Grid, join_grids, on_grid
from penstock.models.weights import ONCE

_SHOWN = 8


class QuantizedTensors:
    """Dequantises the tensors of quantised layers on the fly, and keeps each grid."""

    keeps_floats = False

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        self.description = f"{checkpoint.method}, {checkpoint.bits} bits"
        self._format = format_of(checkpoint)
        self._grids: dict[str, Grid] = {}

    def weights(
        self, tensors: Iterable[tuple[str, Tensor]], has_place: Callable[[str], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors of a float checkpoint: `NAME.weight` in float32 for a quantised layer.

        Drops all-zero biases that the model does not have, which some tools write. Raises CheckpointError for tensors
        of a layer that do not fit together, or are missing.
        """
        required, known = self._format.required, self._format.required | self._format.optional
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            layer, _, kind = name.rpartition(".")
            if kind not in known or (kind == "weight" and tensor.dtype is not torch.int8):
                if kind != "bias" or has_place(name) or (not tensor.is_meta and tensor.any()):
                    yield name, tensor
                continue
            if layer in self._grids or kind in waiting.get(layer, {}):
                raise CheckpointError(f"{name} is there twice. {ONCE}")
            waiting.setdefault(layer, {})[kind] = tensor
            if waiting[layer].keys() == known:
                yield self._finish(layer, waiting.pop(layer))
        missing = [f"{layer}.{kind}" for layer, found in waiting.items() for kind in required - found.keys()]
        if missing:
            shown = ", ".join(sorted(missing)[:_SHOWN])
            raise CheckpointError(
                f"Tensors of quantized layers are missing: {shown} ({len(missing)} in all). "
                "Download the checkpoint again."
            )
        for layer, found in waiting.items():
            yield self._finish(layer, found)

    def method(self, layer: LinearLayer, pieces: list[Piece]) -> QuantizedMethod | None:
        """Return the linear method of a weight made of these tensors; None for float ones.

        Raises UnsupportedFeature if they are quantised differently, or a rank's shard splits groups.
        """
        modules = [piece.name.removesuffix(".weight") for piece in pieces]
        quantized = [module for module in modules if module in self._grids]
        if not quantized:
            return None
        if quantized != modules:
            raise UnsupportedFeature(
                f"{', '.join(quantized)}: quantized, while what is computed together with them here is not. Take a "
                "checkpoint that quantizes them alike."
            )
        grids = [self._grids[module].of(piece.part, module) for module, piece in zip(modules, pieces, strict=True)]
        grid = join_grids(grids, modules)
        return QuantizedMethod(grid.round) if grid.order_I is None else ReorderedMethod(grid.round, grid.order_I)

    def choose(self, layer: LinearLayer) -> QuantizedMethod:
        raise AssertionError("models that run through Transformers take no quantised checkpoints")

    def _finish(self, layer: str, found: Mapping[str, Tensor]) -> tuple[str, Tensor]:
        values_OI, self._grids[layer] = self._format.read(layer, found)
        return f"{layer}.weight", on_grid(values_OI, self._grids[layer])
