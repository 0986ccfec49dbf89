"""GPTQ: int4 quantisation with error feedback (Frantar et al., 2023, https://arxiv.org/abs/2210.17323).

Input features are quantised one after another; the weights of the features that follow compensate each one's error in
the layer's outputs, as measured on calibration data.
Suffixes: T tokens, O output features, I input features, B input features of a block, G groups of input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.kernels.quantized import INT4_LEVELS, QuantizedWeight
from penstock.layers.linear import LinearLayer, LinearMethod
from penstock.layers.quantization.quantize import GROUP_SIZE, join_rows, quantize_int4


class GramMethod(LinearMethod):
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
def accumulate_grams(
    layers: Sequence[LinearLayer], *, only_inputs_of: Sequence[LinearLayer] = ()
) -> Iterator[list[Tensor]]:
    """Record the inputs of these layers inside the block. Yields the accumulated x^T x of each, [I, I].

    only_inputs_of: layers whose outputs are not needed meanwhile.
    """
    methods = [GramMethod(layer.method, layer.input_size, only_inputs=layer in only_inputs_of) for layer in layers]
    for layer, method in zip(layers, methods, strict=True):
        layer.method = method
    try:
        yield [method.gram_II for method in methods]
    finally:
        for layer, method in zip(layers, methods, strict=True):
            layer.method = method.method


# Damping of the Hessian's diagonal, relative to its mean.
_DAMPING = 0.01
# Weights processed at once; several float32 copies of them exist.
_WEIGHTS_AT_ONCE = 1 << 23
# Input features per block; a block's errors are applied to later features together.
_BLOCK = 128


def gptq_quantize(weight_OI: Tensor, gram_II: Tensor, group_size: int = GROUP_SIZE) -> QuantizedWeight:
    """Quantise like `quantize_int4`, with the same scales and minimums, but GPTQ's choice of integers.

    gram_II: x^T x of the layer's calibration inputs x, summed; zeros give round-to-nearest.
    Raises ModelError for a sum that is not finite.
    """
    upper_II = _inverse_factor(gram_II)
    num_rows = max(1, _WEIGHTS_AT_ONCE // weight_OI.shape[1])
    return join_rows([_quantize_rows(part_OI, upper_II, group_size) for part_OI in weight_OI.split(num_rows)])


def _quantize_rows(weight_OI: Tensor, upper_II: Tensor, group_size: int) -> QuantizedWeight:
    """Quantise rows (output features), which are independent of each other."""
    nearest = quantize_int4(weight_OI, group_size)
    weight_IO = weight_OI.float().T.contiguous()
    values_IO = torch.empty(weight_IO.shape, dtype=torch.int8)
    for begin in range(0, len(weight_IO), _BLOCK):
        end = min(begin + _BLOCK, len(weight_IO))
        block = slice(begin, end)
        groups = [index // nearest.shape.group_size for index in range(begin, end)]
        errors_BO = _quantize_block(weight_IO[block], values_IO[block], nearest, groups, upper_II[block, block])
        weight_IO[end:] -= upper_II[block, end:].T @ errors_BO
    return QuantizedWeight(nearest.shape, values_IO.T.contiguous(), nearest.scales_OG, nearest.minimums_OG)


def _quantize_block(
    weight_BO: Tensor, values_BO: Tensor, grid: QuantizedWeight, groups: list[int], upper_BB: Tensor
) -> Tensor:
    """Quantise a block, updating its remaining weights in place. Returns the errors to compensate in later blocks.

    groups: group of each input feature.
    """
    assert grid.minimums_OG is not None, "int4 has minimums"
    errors_BO = torch.empty_like(weight_BO)
    diagonal_B = upper_BB.diagonal().tolist()
    for index, group in enumerate(groups):
        scale_O, minimum_O = grid.scales_OG[:, group], grid.minimums_OG[:, group]
        divisor_O = torch.where(scale_O == 0, 1.0, scale_O)
        value_O = ((weight_BO[index] - minimum_O) / divisor_O).round_().clamp_(0, INT4_LEVELS - 1)
        values_BO[index] = value_O.to(torch.int8)
        rounded_O = value_O.mul_(scale_O).add_(minimum_O)
        errors_BO[index] = (weight_BO[index] - rounded_O) / diagonal_B[index]
        weight_BO[index + 1 :].addr_(upper_BB[index, index + 1 :], errors_BO[index], alpha=-1)
    return errors_BO


def _inverse_factor(gram_II: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped Hessian: float32 [I, I]."""
    gram_II = gram_II.double()
    if not gram_II.isfinite().all():
        raise ModelError(
            "The calibration text leads to activations that are not finite. Give another quantization_calibration, or "
            "'none'."
        )
    diagonal_I = gram_II.diagonal()
    # An input feature that is always zero has no effect.
    diagonal_I[diagonal_I == 0] = 1
    diagonal_I += _DAMPING * diagonal_I.mean()
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(gram_II))
    upper_II: Tensor = torch.linalg.cholesky(inverse_II, upper=True)
    return upper_II.float()
