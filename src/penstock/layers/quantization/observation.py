"""Recording of linear layers' inputs for calibration.

Suffixes: T tokens, I input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.layers.linear import LinearLayer, LinearMethod


class ObservedMethod(LinearMethod):
    """Wraps a linear method and accumulates x^T x of its inputs in float32: `gram_II`.

    only_inputs: skip the product and return zeros.
    """

    def __init__(self, method: LinearMethod, input_size: int, *, only_inputs: bool) -> None:
        self.method = method
        self.gram_II = torch.zeros(input_size, input_size)
        self._only_inputs = only_inputs

    def process_weights_after_loading(self, layer: LinearLayer) -> None:
        self.method.process_weights_after_loading(layer)

    def restore_weights(self, layer: LinearLayer) -> None:
        self.method.restore_weights(layer)

    def apply(self, layer: LinearLayer, x_TI: Tensor) -> Tensor:
        flat_TI = x_TI.reshape(-1, x_TI.shape[-1]).float()
        self.gram_II.addmm_(flat_TI.T, flat_TI)
        if self._only_inputs:
            return x_TI.new_zeros(*x_TI.shape[:-1], layer.output_size)
        return self.method.apply(layer, x_TI)


@contextmanager
def observed(layers: Sequence[LinearLayer], *, only_inputs_of: Sequence[LinearLayer] = ()) -> Iterator[list[Tensor]]:
    """Record the inputs of these layers inside the block. Yields the accumulated x^T x of each, [I, I].

    only_inputs_of: layers whose outputs are not needed meanwhile.
    """
    methods = [ObservedMethod(layer.method, layer.input_size, only_inputs=layer in only_inputs_of) for layer in layers]
    for layer, method in zip(layers, methods, strict=True):
        layer.method = method
    try:
        yield [method.gram_II for method in methods]
    finally:
        for layer, method in zip(layers, methods, strict=True):
            layer.method = method.method
