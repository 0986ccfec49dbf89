"""Quantisation at load of GGUF files: products are computed from their own blocks, in the layout of the kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from penstock.device.stand_in import stands_for_cpu
from penstock.layers.linear import LinearLayer
from penstock.layers.quantization.method import QuantizedMethod
from penstock.loader.gguf.grids import alike
from penstock.loader.gguf.tensors import GgufWeights
from penstock.loader.quantized.assembly import Piece
from penstock.loader.quantized.grid import join_grids
from penstock.parallel.share import Indivisible

logger = logging.getLogger(__name__)
_SHOWN = 4


class GgufProducts:
    """Keeps the integers, scales and minimums of quantised matrices, for CPUs; others take the weights' dtype."""

    description = "products of the GGUF file's own blocks"
    keeps_floats = False

    def __init__(self, weights: GgufWeights) -> None:
        self._weights = weights
        self._computed: set[str] = set()

    def weights(
        self, tensors: Iterable[tuple[str, Tensor]], has_place: Callable[[str], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors, and log those that are not computed from their blocks."""
        yield from tensors
        dequantised = [name for name in self._weights.quantized_names if name not in self._computed]
        if dequantised and not stands_for_cpu():
            logger.info(
                "GGUF: %d quantised tensors are not computed from their blocks, but dequantised to the dtype of the "
                "weights: %s%s",
                len(dequantised),
                ", ".join(dequantised[:_SHOWN]),
                "" if len(dequantised) <= _SHOWN else " ...",
            )

    def method(self, layer: LinearLayer, pieces: list[Piece]) -> QuantizedMethod | None:
        """Return the linear method of a weight made of these tensors; None for one that is kept in floating point.

        Floating point are weights of a type without kernels, of types without a common format, and those whose groups
        ranks would split.
        """
        names = [piece.name for piece in pieces]
        try:
            found = [self._weights.grid(piece.name, piece.part) for piece in pieces]
        except Indivisible:
            return None
        grids = [grid for grid in found if grid is not None]
        formats = alike(grids) if len(grids) == len(pieces) else None
        if formats is None:
            return None
        self._computed.update(names)
        return QuantizedMethod(join_grids(formats, names).round)

    def choose(self, layer: LinearLayer) -> QuantizedMethod:
        raise AssertionError("models that run through Transformers have no products of blocks")
