"""Observation of linear layers' inputs, for calibration. Suffixes: T tokens, I input features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.layers.linear import LinearLayer, LinearMethod


@dataclass(slots=True)
class InputStatistics:
    """Statistics of a layer's inputs. values: float32. num_rows: of inputs; few for an expert that few tokens chose."""

    values: Tensor
    num_rows: int = 0


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
) -> Iterator[list[InputStatistics]]:
    """Record the inputs of these layers inside the block. Yields the accumulated x^T x of each, [I, I].

    only_inputs_of: layers whose outputs are not needed meanwhile.
    """
    grams = [InputStatistics(torch.zeros(layer.input_size, layer.input_size)) for layer in layers]

    def add_to(gram: InputStatistics) -> Callable[[Tensor], object]:
        def add(x_TI: Tensor) -> None:
            gram.values.addmm_(x_TI.T, x_TI)
            gram.num_rows += len(x_TI)

        return add

    with _observing(layers, [add_to(gram) for gram in grams], only_inputs_of):
        yield grams


@contextmanager
def record_peaks(layers: Sequence[LinearLayer]) -> Iterator[list[InputStatistics]]:
    """Record the largest magnitude of every input feature inside the block: of each layer, [I]."""
    peaks = [InputStatistics(torch.zeros(layer.input_size)) for layer in layers]

    def raise_to(peak: InputStatistics) -> Callable[[Tensor], object]:
        def take(x_TI: Tensor) -> None:
            torch.maximum(peak.values, x_TI.abs().amax(dim=0), out=peak.values)
            peak.num_rows += len(x_TI)

        return take

    with _observing(layers, [raise_to(peak) for peak in peaks]):
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
