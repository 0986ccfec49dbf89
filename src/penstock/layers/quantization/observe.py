"""Observation of linear layers' inputs, for calibration. Suffixes: T tokens, I input features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.layers.linear import LinearLayer, LinearMethod


class ObservedMethod(LinearMethod):
    """Wraps a linear method. observe: called with the inputs, float32 [T, I].

    only_inputs: skip the product and return zeros.
    """

    def __init__(self, method: LinearMethod, observe: Callable[[Tensor], object], *, only_inputs: bool) -> None:
        self.method = method
        self._observe = observe
        self._only_inputs = only_inputs

    def process_weights_after_loading(self, layer: LinearLayer) -> None:
        self.method.process_weights_after_loading(layer)

    def restore_weights(self, layer: LinearLayer) -> None:
        self.method.restore_weights(layer)

    def apply(self, layer: LinearLayer, x_TI: Tensor) -> Tensor:
        self._observe(x_TI.reshape(-1, x_TI.shape[-1]).float())
        if self._only_inputs:
            return x_TI.new_zeros(*x_TI.shape[:-1], layer.output_size)
        return self.method.apply(layer, x_TI)


@contextmanager
def accumulate_grams(
    layers: Sequence[LinearLayer], *, only_inputs_of: Sequence[LinearLayer] = ()
) -> Iterator[list[Tensor]]:
    """Record the inputs of these layers inside the block. Yields the accumulated x^T x of each, float32 [I, I].

    only_inputs_of: layers whose outputs are not needed meanwhile.
    """
    grams = [torch.zeros(layer.input_size, layer.input_size) for layer in layers]

    def add_to(gram_II: Tensor) -> Callable[[Tensor], object]:
        return lambda x_TI: gram_II.addmm_(x_TI.T, x_TI)

    with _observing(layers, [add_to(gram_II) for gram_II in grams], only_inputs_of):
        yield grams


@contextmanager
def record_peaks(layers: Sequence[LinearLayer]) -> Iterator[list[Tensor]]:
    """Record the largest magnitude of every input feature inside the block: of each layer, float32 [I]."""
    peaks = [torch.zeros(layer.input_size) for layer in layers]

    def raise_to(peak_I: Tensor) -> Callable[[Tensor], object]:
        return lambda x_TI: torch.maximum(peak_I, x_TI.abs().amax(dim=0), out=peak_I)

    with _observing(layers, [raise_to(peak_I) for peak_I in peaks]):
        yield peaks


@contextmanager
def _observing(
    layers: Sequence[LinearLayer],
    observers: Sequence[Callable[[Tensor], object]],
    only_inputs_of: Sequence[LinearLayer] = (),
) -> Iterator[None]:
    methods = [layer.method for layer in layers]
    for layer, observe in zip(layers, observers, strict=True):
        layer.method = ObservedMethod(layer.method, observe, only_inputs=layer in only_inputs_of)
    try:
        yield
    finally:
        for layer, method in zip(layers, methods, strict=True):
            layer.method = method
