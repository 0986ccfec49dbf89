"""FP8 weights: float8 times a scale, one of the tensor, one per output feature, or one per block of both features.

Scales of activations, for products in FP8, are not needed and skipped. Suffixes: O output features, I input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoints.quantized_checkpoint import QuantizedCheckpoint
from penstock.errors import CheckpointError


class Float8Format:
    """FP8 tensors of a layer: `weight` [O, I], and its scales."""

    name = "FP8"
    values, scales = ("weight",), ("weight_scale", "weight_scale_inv")
    skipped = ("input_scale", "activation_scale")
    dtypes = (torch.float8_e4m3fn, torch.float8_e5m2)

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        self._block_size = checkpoint.block_size

    def read(self, layer: str, weight_OI: Tensor, scale: Tensor) -> Tensor:
        """Dequantise: float32 [O, I]. Raises CheckpointError for scales of another shape."""
        if scale.numel() == 1:
            return weight_OI.float() * scale.float().reshape(())
        if scale.dim() == 1:
            scale = scale.unsqueeze(1)
        num_outputs, num_inputs = weight_OI.shape
        block_outputs, block_inputs = self._blocks(weight_OI)
        expected = -(-num_outputs // block_outputs), -(-num_inputs // block_inputs)
        if scale.shape != expected:
            raise CheckpointError(
                f"{layer}.weight_scale is {list(scale.shape)}. The weight, {[num_outputs, num_inputs]}, needs "
                f"{list(expected)} scales, for blocks of {block_outputs} x {block_inputs}."
            )
        spread = self.scales_of_outputs(weight_OI, scale)
        return weight_OI.float() * spread.repeat_interleave(block_inputs, 1)[:, :num_inputs]

    def scales_of_outputs(self, weight_OI: Tensor, scale: Tensor) -> Tensor:
        """Scales of each output feature and block of input features, float32 [O, C], of scales that `read` accepts."""
        num_outputs = weight_OI.shape[0]
        if scale.numel() == 1:
            return scale.float().reshape(1, 1).expand(num_outputs, self.num_blocks(weight_OI))
        return scale.float().view(scale.shape[0], -1).repeat_interleave(self._blocks(weight_OI)[0], 0)[:num_outputs]

    def num_blocks(self, weight_OI: Tensor) -> int:
        """Blocks of input features, which have scales of their own."""
        return -(-weight_OI.shape[1] // self.block_inputs(weight_OI))

    def block_inputs(self, weight_OI: Tensor) -> int:
        """Input features of a block."""
        return self._blocks(weight_OI)[1]

    def _blocks(self, weight_OI: Tensor) -> tuple[int, int]:
        return self._block_size or (1, int(weight_OI.shape[1]))
