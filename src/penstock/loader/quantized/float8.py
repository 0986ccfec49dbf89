"""Checkpoints with FP8 weights, read as float tensors: their layers compute in the model's dtype.

A weight is float8 times its scale: one of the tensor, one per output feature, or one per block of both features.
Scales of activations, for products in FP8, are not needed and skipped. Suffixes: O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from penstock.config.quantized_checkpoint import QuantizedCheckpoint
from penstock.errors import CheckpointError
from penstock.layers.linear import LinearLayer, LinearMethod, choose_linear_method
from penstock.loader.quantized.assembly import Piece

_SCALES = ("weight_scale", "weight_scale_inv")
_OF_ACTIVATIONS = ("input_scale", "activation_scale")
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SHOWN = 8


class Float8Tensors:
    """Dequantises FP8 tensors on the fly."""

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        self.description = f"{checkpoint.method}, FP8, dequantised while loading"
        self._block_size = checkpoint.block_size

    def weights(
        self, tensors: Iterable[tuple[str, Tensor]], has_place: Callable[[str], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors of a float checkpoint: `NAME.weight` in float32 for an FP8 layer.

        Raises CheckpointError for a weight without its scale, a scale without its weight, or one of another shape.
        """
        weights: dict[str, Tensor] = {}
        scales: dict[str, Tensor] = {}
        for name, tensor in tensors:
            layer, _, kind = name.rpartition(".")
            if kind in _OF_ACTIVATIONS:
                continue
            if kind == "weight" and tensor.dtype in _FLOAT8:
                weights[layer] = tensor
            elif kind in _SCALES:
                scales[layer] = tensor
            else:
                yield name, tensor
                continue
            if layer in weights and layer in scales:
                yield f"{layer}.weight", self._dequantize(layer, weights.pop(layer), scales.pop(layer))
        missing = [f"{layer}.weight_scale" for layer in weights] + [f"{layer}.weight (float8)" for layer in scales]
        if missing:
            shown = ", ".join(sorted(missing)[:_SHOWN])
            raise CheckpointError(
                f"Tensors of FP8 layers are missing: {shown} ({len(missing)} in all). Download the checkpoint again."
            )

    def method(self, layer: LinearLayer, pieces: list[Piece]) -> LinearMethod | None:
        return None

    def choose(self, layer: LinearLayer) -> LinearMethod:
        return choose_linear_method(layer.weight, layer.compute_dtype)

    def _dequantize(self, layer: str, weight_OI: Tensor, scale: Tensor) -> Tensor:
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
