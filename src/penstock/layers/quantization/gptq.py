"""GPTQ: int4 quantisation with error feedback (Frantar et al., 2023, https://arxiv.org/abs/2210.17323).

Input features are quantised one after another, those with the largest inputs first; the weights of the features that
follow compensate each one's error in the layer's outputs, as measured on calibration data. Scales are those of rounding
to nearest, so the order does not change the format.
Suffixes: T tokens, O output features, I input features, B input features of a block, G groups of input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.kernels.quantized import INT4_LEVELS, QuantizedWeight
from penstock.layers.quantization.quantize import GROUP_SIZE, join_rows, quantize_int4

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
    order_I = torch.argsort(gram_II.diagonal(), descending=True, stable=True)
    upper_II = _inverse_factor(gram_II[order_I][:, order_I])
    num_rows = max(1, _WEIGHTS_AT_ONCE // weight_OI.shape[1])
    return join_rows([_quantize_rows(part_OI, order_I, upper_II, group_size) for part_OI in weight_OI.split(num_rows)])


def _quantize_rows(weight_OI: Tensor, order_I: Tensor, upper_II: Tensor, group_size: int) -> QuantizedWeight:
    """Quantise rows (output features), which are independent of each other. order_I: input features, first to last."""
    nearest = quantize_int4(weight_OI, group_size)
    weight_IO = weight_OI.float().T[order_I].contiguous()
    groups_I = (order_I // nearest.shape.group_size).tolist()
    values_IO = torch.empty(weight_IO.shape, dtype=torch.int8)
    for begin in range(0, len(weight_IO), _BLOCK):
        end = min(begin + _BLOCK, len(weight_IO))
        block = slice(begin, end)
        errors_BO = _quantize_block(
            weight_IO[block], values_IO[block], nearest, groups_I[block], upper_II[block, block]
        )
        weight_IO[end:] -= upper_II[block, end:].T @ errors_BO
    values_OI = values_IO[torch.argsort(order_I)].T.contiguous()
    return QuantizedWeight(nearest.shape, values_OI, nearest.scales_OG, nearest.minimums_OG)


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
