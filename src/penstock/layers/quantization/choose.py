"""Which linear layers are quantised at loading, and how."""

from __future__ import annotations

from collections.abc import Callable

from penstock.layers.linear import LinearLayer, LinearMethod
from penstock.layers.quantization.method import QuantizedMethod, RefinedMethod, Rounding
from penstock.layers.quantization.rounding import quantize_int4, quantize_int8

MethodChoice = Callable[[LinearLayer], LinearMethod]


def choose_method(quantization: str) -> MethodChoice:
    """How each linear layer of a model with float weights multiplies. quantization: "int8" or "int4"."""
    if quantization == "int8":
        return lambda _layer: QuantizedMethod(quantize_int8)
    return lambda layer: int4_method(layer, quantize_int4)


def int4_method(layer: LinearLayer, round_weight: Rounding) -> LinearMethod:
    """How a layer multiplies whose weight is rounded to 4 bits in this way."""
    return RefinedMethod(round_weight) if layer.tied_to else QuantizedMethod(round_weight)
