"""Linear method with an FP8 weight on a GPU, with the scales of its checkpoint.

Suffixes: T tokens, I input features, O output features, C blocks of input features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.kernels.gpu_float8 import Float8Weight, float8_linear
from penstock.kernels.stored_weight import StoredWeight
from penstock.layers.linear import LinearLayer, PackedMethod, argmax_on_gpu


class Float8Method(PackedMethod):
    """Keeps the values in FP8. scales_OC: float32, of blocks of `block_size` input features.

    The layer's weight is the dequantised one, in float32.
    """

    def __init__(self, scales_OC: Tensor, block_size: int) -> None:
        super().__init__()
        self._scales_OC, self.block_size = scales_OC, block_size
        self._is_invariant = False

    @property
    def description(self) -> str:
        return f"{super().description}, blocks of {self.block_size} inputs"

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return (*super().kept, self._scales_OC)

    def process_weights_after_loading(self, layer: LinearLayer) -> None:
        self._is_invariant = layer.batch_invariant
        super().process_weights_after_loading(layer)

    def adopt(self, layer: LinearLayer, tensors: Mapping[str, Tensor]) -> None:
        self._is_invariant = layer.batch_invariant
        super().adopt(layer, tensors)

    def pack(self, weight_OI: Tensor) -> Tensor:
        if weight_OI.is_meta:
            return torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn, device=weight_OI.device)
        weight = Float8Weight.of(weight_OI, self._scales_OC, self.block_size)
        self._scales_OC = weight.scales_OC
        return weight.values_OI

    def unpack(self, packed_OI: Tensor, output_size: int) -> Tensor:
        """The dequantised weight, float32."""
        return self._weight(packed_OI).dequantize()

    def loaded_weight(self, layer: LinearLayer) -> Tensor | None:
        return None

    def stored_weight(self, layer: LinearLayer) -> StoredWeight | None:
        return None if self.packed_OI is None else self._weight(self.packed_OI).stored

    def multiply(self, x_TI: Tensor, packed_OI: Tensor, output_size: int, bias_O: Tensor | None) -> Tensor:
        return float8_linear(x_TI, self._weight(packed_OI), bias_O, is_invariant=self._is_invariant)

    def argmax(
        self, layer: LinearLayer, x_LI: Tensor, *, with_largest: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        return argmax_on_gpu(self.apply(layer, x_LI))

    def _weight(self, packed_OI: Tensor) -> Float8Weight:
        return Float8Weight(packed_OI, self._scales_OC, self.block_size)
