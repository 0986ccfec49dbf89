"""Products with MXFP4 weights as they are stored, for CPUs.

Weights are loaded as twice their E2M1 numbers, int8, so that nothing is dequantised and quantised again.
"""

from __future__ import annotations

from torch import Tensor

from penstock.checkpoints.quantized_checkpoint import QuantizedCheckpoint
from penstock.errors import UnsupportedFeature
from penstock.layers.linear import LinearLayer, LinearMethod
from penstock.layers.quantization.method import QuantizedMethod
from penstock.loader.quantized.assembly import Piece
from penstock.loader.quantized.dequantized import DequantizedTensors
from penstock.loader.quantized.grid import Grid, join_grids
from penstock.loader.quantized.mxfp4 import BLOCK_SIZE, Mxfp4Format, doubled, factors


class Mxfp4Products(DequantizedTensors):
    """Keeps the codes and scales of MXFP4 layers; the others compute with float weights."""

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        super().__init__(checkpoint)
        self.description = "products of the checkpoint's own MXFP4 blocks"
        self._grids: dict[str, Grid] = {}

    def method(self, layer: LinearLayer, pieces: list[Piece]) -> LinearMethod | None:
        """Return the linear method of a weight made of these tensors; None for floats.

        Raises UnsupportedFeature if a rank's shard splits blocks, or if only some of the tensors are in MXFP4.
        """
        modules = [piece.name.removesuffix(".weight") for piece in pieces]
        floats = [module for module in modules if module not in self._grids]
        if len(floats) == len(modules):
            return None
        if floats:
            raise UnsupportedFeature(
                f"{', '.join(modules)} are computed together here, but {floats[0]} is not stored in MXFP4. "
                "Dequantise the checkpoint: quantization='none'."
            )
        grids = [self._grids[module].of(piece.part, module) for module, piece in zip(modules, pieces, strict=True)]
        return QuantizedMethod(join_grids(grids, modules).round)

    def _read(self, layer: str, values: Tensor, scales: Tensor) -> Tensor:
        Mxfp4Format.check(layer, values, scales)
        self._grids[layer] = Grid(4, BLOCK_SIZE, factors(scales) / 2)
        return doubled(values)
