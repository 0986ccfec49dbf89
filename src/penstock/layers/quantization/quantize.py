"""Weight quantisation: round-to-nearest int8 and int4.

Suffixes: O output features, I input features, G groups of input features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.device.stand_in import is_on_cpu
from penstock.kernels.quantized import INT4_LEVELS, INT8_LIMIT, QuantizedShape, QuantizedWeight

# Input features that share a scale on a CPU, whose products quantise activations in the same groups; GGUF's Q8_0 and
# Q4_1 have such groups too.
GROUP_SIZE = 32
# On a GPU int4 kernels take longer for smaller groups, and int8 kernels have one scale per output feature.
_INT4_GROUP_SIZE_ON_GPU = 128
# Weights processed at once in the search for ranges: on a CPU few, to stay in its caches, and on a GPU many, since
# each operator costs a launch.
_ELEMENTS_AT_ONCE, _ELEMENTS_ON_GPU = 1 << 18, 1 << 24
# Fractions of a group's range that the clipping search tries.
_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


def quantize_int8(weight_OI: Tensor, group_size: int | None = None) -> QuantizedWeight:
    """Symmetric int8, one scale per output feature and group of input features: the largest weight becomes 127.

    group_size: by default 32 on a CPU and whole rows on a GPU.
    """
    if group_size is None:
        group_size = GROUP_SIZE if is_on_cpu(weight_OI) else weight_OI.shape[1]
    groups_OGS = _groups(weight_OI.float(), group_size)
    return round_to_int8(weight_OI, groups_OGS.abs().amax(dim=2) / INT8_LIMIT, group_size)


def round_to_int8(weight_OI: Tensor, scales_OG: Tensor, group_size: int) -> QuantizedWeight:
    """Round to the nearest integers for these scales; some tools use -128 too."""
    num_outputs, num_inputs = weight_OI.shape
    group_size = min(group_size, num_inputs)
    divisor_OG1 = _divisor(scales_OG).unsqueeze(2)
    values_OGS = (_groups(weight_OI.float(), group_size) / divisor_OG1).round_().clamp_(-INT8_LIMIT - 1, INT8_LIMIT)
    values_OI = values_OGS.flatten(1)[:, :num_inputs].to(torch.int8)
    return QuantizedWeight(QuantizedShape(8, num_outputs, num_inputs, group_size), values_OI, scales_OG.float())


def quantize_int4(weight_OI: Tensor, group_size: int | None = None) -> QuantizedWeight:
    """Asymmetric int4, a scale and a zero point per group of input features.

    The clipping range of each group is the one with the least squared error. group_size: by default 32 on a CPU and 128
    on a GPU.
    """
    if group_size is None:
        group_size = GROUP_SIZE if is_on_cpu(weight_OI) else _INT4_GROUP_SIZE_ON_GPU
    num_rows = _rows_at_once(weight_OI)
    grids = [_best_grid(_groups(part_OI.float(), group_size)) for part_OI in weight_OI.split(num_rows)]
    scales_OG = torch.cat([scale_OG for scale_OG, _ in grids])
    zeros_OG = torch.cat([zero_OG for _, zero_OG in grids]).to(torch.uint8)
    return round_to_int4(weight_OI, scales_OG, zeros_OG, group_size)


def quantize_int4_residual(weight_OI: Tensor, rounded: QuantizedWeight) -> QuantizedWeight:
    """Quantise the residual of an int4 weight to 4 more bits: together they are nearly as exact as int8."""
    num_outputs = weight_OI.shape[0]
    num_rows = _rows_at_once(weight_OI)
    parts = [slice(first, first + num_rows) for first in range(0, num_outputs, num_rows)]
    return join_rows(
        [
            quantize_int4(weight_OI[rows].float() - rounded.rows(rows).dequantize(), rounded.shape.group_size)
            for rows in parts
        ]
    )


def _rows_at_once(weight_OI: Tensor) -> int:
    if weight_OI.is_meta:  # no search without values
        return weight_OI.shape[0]
    return max(1, (_ELEMENTS_ON_GPU if weight_OI.is_cuda else _ELEMENTS_AT_ONCE) // weight_OI.shape[1])


def join_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate int4 weights along the output features."""
    values_OI = torch.cat([part.values_OI for part in parts])
    num_outputs, num_inputs = values_OI.shape
    shape = QuantizedShape(4, num_outputs, num_inputs, parts[0].shape.group_size)
    return QuantizedWeight(
        shape,
        values_OI,
        torch.cat([part.scales_OG for part in parts]),
        torch.cat([part.zeros_OG for part in parts if part.zeros_OG is not None]),
    )


def round_to_int4(weight_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor, group_size: int) -> QuantizedWeight:
    """Round to the nearest integers for these scales and zero points."""
    num_outputs, num_inputs = weight_OI.shape
    group_size = min(group_size, num_inputs)
    values_OGS = _values(_groups(weight_OI.float(), group_size), scales_OG.float(), zeros_OG.float())
    values_OI = values_OGS.flatten(1)[:, :num_inputs].to(torch.int8)
    shape = QuantizedShape(4, num_outputs, num_inputs, group_size)
    return QuantizedWeight(shape, values_OI, scales_OG.float(), zeros_OG)


def _groups(weight_OI: Tensor, group_size: int) -> Tensor:
    """Reshape to [O, G, S]; the last group is padded with zeros, which do not change its range."""
    num_inputs = weight_OI.shape[1]
    group_size = min(group_size, num_inputs)
    padded_OI = F.pad(weight_OI, (0, -num_inputs % group_size))
    return padded_OI.view(weight_OI.shape[0], -1, group_size)


def _best_grid(groups_OGS: Tensor) -> tuple[Tensor, Tensor]:
    low_OG = groups_OGS.amin(dim=2).clamp_(max=0)
    high_OG = groups_OGS.amax(dim=2).clamp_(min=0)
    best_scale_OG, best_zero_OG = _grid(low_OG, high_OG)
    least_OG = _squared_error(groups_OGS, best_scale_OG, best_zero_OG)
    for share in _RANGES[1:]:
        scale_OG, zero_OG = _grid(low_OG * share, high_OG * share)
        error_OG = _squared_error(groups_OGS, scale_OG, zero_OG)
        better_OG = error_OG < least_OG
        least_OG = torch.where(better_OG, error_OG, least_OG)
        best_scale_OG = torch.where(better_OG, scale_OG, best_scale_OG)
        best_zero_OG = torch.where(better_OG, zero_OG, best_zero_OG)
    return best_scale_OG, best_zero_OG


def _grid(low_OG: Tensor, high_OG: Tensor) -> tuple[Tensor, Tensor]:
    scale_OG = (high_OG - low_OG) / (INT4_LEVELS - 1)
    return scale_OG, (-low_OG / _divisor(scale_OG)).round_()


def _values(groups_OGS: Tensor, scale_OG: Tensor, zero_OG: Tensor) -> Tensor:
    quotient_OGS = (groups_OGS / _divisor(scale_OG).unsqueeze(2)).round_()
    return quotient_OGS.add_(zero_OG.unsqueeze(2)).clamp_(0, INT4_LEVELS - 1)


def _squared_error(groups_OGS: Tensor, scale_OG: Tensor, zero_OG: Tensor) -> Tensor:
    rounded_OGS = _values(groups_OGS, scale_OG, zero_OG).sub_(zero_OG.unsqueeze(2)).mul_(scale_OG.unsqueeze(2))
    return rounded_OGS.sub_(groups_OGS).square_().sum(dim=2)


def _divisor(scales: Tensor) -> Tensor:
    """Replace zero scales, of groups that are all zero, to divide by."""
    return torch.where(scales == 0, 1.0, scales.float())
