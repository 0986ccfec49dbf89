"""FP8 weights: float8 times a scale, one of the tensor, one per output feature, or one per block of both features.

Scales of activations, for products in FP8, are not needed and skipped. Suffixes: O output features, I input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.config.quantized_checkpoint import QuantizedCheckpoint
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
        block_outputs, block_inputs = self._block_size or (1, num_inputs)
        expected = -(-num_outputs // block_outputs), -(-num_inputs // block_inputs)
        if scale.shape != expected:
            raise CheckpointError(
                f"{layer}.weight_scale is {list(scale.shape)}. The weight, {[num_outputs, num_inputs]}, needs "
                f"{list(expected)} scales, for blocks of {block_outputs} x {block_inputs}."
            )
        spread = scale.float().repeat_interleave(block_outputs, 0)[:num_outputs]
        return weight_OI.float() * spread.repeat_interleave(block_inputs, 1)[:, :num_inputs]
