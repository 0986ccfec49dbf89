"""Choice of the quantisation method of linear layers at loading."""

from __future__ import annotations

from collections.abc import Callable

from penstock.layers.linear import LinearLayer, LinearMethod
from penstock.layers.quantization.method import QuantizedMethod, RefinedMethod, Rounding
from penstock.layers.quantization.rounding import quantize_int4, quantize_int8

MethodChoice = Callable[[LinearLayer], LinearMethod]


def choose_method(quantization: str) -> MethodChoice:
    """Return the choice of a `LinearMethod` for float weights. quantization: "int8" or "int4"."""
    if quantization == "int8":
        return lambda _layer: QuantizedMethod(quantize_int8)
    return lambda layer: int4_method(layer, quantize_int4)


def int4_method(layer: LinearLayer, round_weight: Rounding) -> LinearMethod:
    """Return the int4 method of a layer. round_weight: quantises its weight."""
    return RefinedMethod(round_weight) if layer.tied_to else QuantizedMethod(round_weight)
