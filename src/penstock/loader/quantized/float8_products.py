"""FP8 checkpoints whose weights stay in FP8 on a GPU.

Suffixes: O output features, I input features, C blocks of input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoints.quantized_checkpoint import QuantizedCheckpoint
from penstock.kernels.gpu_float8 import takes_blocks
from penstock.kernels.native import NATIVE
from penstock.layers.linear import LinearLayer, LinearMethod
from penstock.layers.quantization.float8 import Float8Method
from penstock.loader.quantized.assembly import Piece
from penstock.loader.quantized.dequantized import DequantizedTensors
from penstock.loader.quantized.float8 import Float8Format


class _FormatWithScales(Float8Format):
    """Notes the scales of each weight that it reads, float32 [O, C], by the weight's name."""

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        super().__init__(checkpoint)
        self.scales_of: dict[str, Tensor] = {}

    def read(self, layer: str, weight_OI: Tensor, scale: Tensor) -> Tensor:
        dequantised_OI = super().read(layer, weight_OI, scale)
        if weight_OI.dtype is torch.float8_e4m3fn and takes_blocks(self.block_inputs(weight_OI), weight_OI.shape[1]):
            self.scales_of[f"{layer}.weight"] = self.scales_of_outputs(weight_OI, scale)
        return dequantised_OI


class Float8Tensors(DequantizedTensors):
    """Layers keep their FP8 values, and the scales of the checkpoint; others are dequantised."""

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        super().__init__(checkpoint)
        self._with_scales = self._format = _FormatWithScales(checkpoint)
        self._block_size = checkpoint.block_size
        self.description = f"{checkpoint.method}, {self._format.name}, in FP8 products"

    def method(self, layer: LinearLayer, pieces: list[Piece]) -> LinearMethod | None:
        scales = [self._with_scales.scales_of.pop(piece.name, None) for piece in pieces]
        found = [scale_OC for scale_OC in scales if scale_OC is not None]
        if len(found) < len(pieces) or any(piece.part is not None for piece in pieces):
            return None
        if layer.own_method(NATIVE) is not None:
            return None
        return Float8Method(torch.cat(found), layer.input_size if self._block_size is None else self._block_size[1])
