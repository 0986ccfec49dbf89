"""Checkpoints of narrow floats (FP8, MXFP4), read as float tensors.

Their layers compute in the model's dtype, or are quantised again by the option `quantization`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.checkpoints.quantized_checkpoint import MXFP4, QuantizedCheckpoint
from penstock.errors import CheckpointError
from penstock.layers.linear import LinearLayer, LinearMethod, choose_linear_method
from penstock.loader.quantized.assembly import OptionRounding, Piece
from penstock.loader.quantized.float8 import Float8Format
from penstock.loader.quantized.mxfp4 import Mxfp4Format

_SHOWN = 8


class NarrowFormat(Protocol):
    """A format of narrow floats. values, scales, skipped: names of a layer's tensors. dtypes: of the values."""

    name: str

    @property
    def values(self) -> Sequence[str]: ...
    @property
    def scales(self) -> Sequence[str]: ...
    @property
    def skipped(self) -> Sequence[str]: ...
    @property
    def dtypes(self) -> Sequence[torch.dtype]: ...

    def read(self, layer: str, values: Tensor, scales: Tensor) -> Tensor:
        """Dequantise a layer's weight: float32 [O, I]. Raises CheckpointError for tensors that do not fit together."""


def _format_of(checkpoint: QuantizedCheckpoint) -> NarrowFormat:
    return Mxfp4Format() if checkpoint.method == MXFP4 else Float8Format(checkpoint)


class DequantizedTensors:
    """Dequantises tensors on the fly. option: quantises them again; None keeps them in floating point."""

    def __init__(self, checkpoint: QuantizedCheckpoint, option: OptionRounding | None = None) -> None:
        self._format, self._option = _format_of(checkpoint), option
        then = "" if option is None else f", then {option.description}"
        self.description = f"{checkpoint.method}, {self._format.name}, dequantised while loading{then}"
        self.keeps_floats = option is None

    def weights(
        self, tensors: Iterable[tuple[str, Tensor]], has_place: Callable[[str], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors of a float checkpoint: `NAME.weight` in float32 for a quantised layer.

        Raises CheckpointError for a weight without its scale, a scale without its weight, or one of another shape.
        """
        known, values, scales = self._format, dict[str, Tensor](), dict[str, Tensor]()
        for name, tensor in tensors:
            layer, _, kind = name.rpartition(".")
            if kind in known.skipped:
                continue
            if kind in known.values and tensor.dtype in known.dtypes:
                values[layer] = tensor
            elif kind in known.scales:
                scales[layer] = tensor
            else:
                yield name, tensor
                continue
            if layer in values and layer in scales:
                yield f"{layer}.weight", self._read(layer, values.pop(layer), scales.pop(layer))
        missing = [f"{layer}.{known.scales[0]}" for layer in values]
        missing += [f"{layer}.{known.values[0]} ({known.name})" for layer in scales]
        if missing:
            shown = ", ".join(sorted(missing)[:_SHOWN])
            raise CheckpointError(
                f"Tensors of {known.name} layers are missing: {shown} ({len(missing)} in all). "
                "Download the checkpoint again."
            )

    def method(self, layer: LinearLayer, pieces: list[Piece]) -> LinearMethod | None:
        return None if self._option is None else self._option.method(layer, pieces)

    def _read(self, layer: str, values: Tensor, scales: Tensor) -> Tensor:
        return self._format.read(layer, values, scales)

    def choose(self, layer: LinearLayer) -> LinearMethod:
        if self._option is not None:
            return self._option.choose(layer)
        return choose_linear_method(layer.weight, layer.compute_dtype, layer.cpu_arithmetic)
