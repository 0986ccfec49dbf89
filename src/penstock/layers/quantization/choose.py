"""Which linear layers are quantised at loading, and how."""

from __future__ import annotations

from collections.abc import Callable

from penstock.layers.linear import LinearLayer, LinearMethod
from penstock.layers.quantization.method import QuantizedMethod
from penstock.layers.quantization.rounding import quantize_int4, quantize_int8

MethodChoice = Callable[[LinearLayer], LinearMethod]


def choose_method(quantization: str, vocab_size: int) -> MethodChoice:
    """How each linear layer of a model with float weights multiplies. quantization: "int8" or "int4".

    The output projection has 8 bits in either case: it is one product of many, and the one whose errors nothing after
    it evens out.
    """

    def choose(layer: LinearLayer) -> LinearMethod:
        if quantization == "int4" and layer.output_size != vocab_size:
            return QuantizedMethod(quantize_int4)
        return QuantizedMethod(quantize_int8)

    return choose
