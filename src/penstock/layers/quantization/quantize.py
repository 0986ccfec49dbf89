"""Weight quantisation: round-to-nearest int8 and int4, and rounding to the grid of a checkpoint.

Suffixes: O output features, I input features, G groups of input features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.device.stand_in import is_on_cpu
from penstock.kernels.quantized import INT4_LEVELS, INT8_LIMIT, QuantizedShape, QuantizedWeight, minimums_of

# Input features that share a scale on a CPU, whose products quantise activations in the same groups; GGUF's Q8_0 and
# Q4_1 have such groups too.
GROUP_SIZE = 32
# On a GPU int4 kernels take longer for smaller groups, and int8 kernels have one scale per output feature.
_INT4_GROUP_SIZE_ON_GPU = 128
# Weights processed at once in the search for ranges: on a CPU few, to stay in its caches, and on a GPU many, since
# each operator costs a launch.
_ELEMENTS_AT_ONCE, _ELEMENTS_ON_GPU = 1 << 18, 1 << 24
# Fractions of a group's range that the clipping search tries.
_RANGES = (1.0, 0.9, 0.8)
# Of float32; all of them are set in infinity.
_EXPONENT_BITS = 0x7F800000


def group_size_of(quantization: str, num_inputs: int, *, is_on_cpu: bool) -> int:
    """Input features that share a scale. quantization: "int8" or "int4"."""
    size = GROUP_SIZE if is_on_cpu else _INT4_GROUP_SIZE_ON_GPU if quantization == "int4" else num_inputs
    return min(size, num_inputs)


def quantize_int8(weight_OI: Tensor, group_size: int | None = None) -> QuantizedWeight:
    """Symmetric int8, one scale per output feature and group of input features: the largest weight becomes 127.

    group_size: by default 32 on a CPU, with scales of 16 bits, and whole rows on a GPU.
    """
    if group_size is None:
        group_size = group_size_of("int8", weight_OI.shape[1], is_on_cpu=is_on_cpu(weight_OI))
    largest = [_groups(part_OI.float(), group_size).abs().amax(dim=2) for part_OI in _parts(weight_OI)]
    scales_OG, scale_bytes = _narrowed(torch.cat(largest) / INT8_LIMIT)
    return round_to_int8(weight_OI, scales_OG, group_size, scale_bytes)


def round_to_int8(
    weight_OI: Tensor,
    scales_OG: Tensor,
    group_size: int,
    scale_bytes: int = 4,
    minimums_OG: Tensor | None = None,
) -> QuantizedWeight:
    """Round to the nearest integers for these scales; some tools use -128 too. With minimums from 0 to 127."""
    limits = -INT8_LIMIT - 1 if minimums_OG is None else 0, INT8_LIMIT
    values_OI = _rounded(weight_OI, scales_OG, minimums_OG, group_size, limits)
    return _weight(8, values_OI, scales_OG, minimums_OG, group_size, scale_bytes)


def quantize_int4(weight_OI: Tensor, group_size: int | None = None) -> QuantizedWeight:
    """Asymmetric int4, a scale and a minimum per group of input features.

    The grid of each group is the one of several with the least squared error. group_size: by default 32 on a CPU, with
    scales and minimums of 16 bits, and 128 on a GPU, where minimums are zero points times the scale.
    """
    if group_size is None:
        group_size = group_size_of("int4", weight_OI.shape[1], is_on_cpu=is_on_cpu(weight_OI))
    best_grid = _best_grid if is_on_cpu(weight_OI) else _best_grid_with_zero_points
    grids = [best_grid(_groups(part_OI.float(), group_size)) for part_OI in _parts(weight_OI)]
    scales_OG = torch.cat([scale_OG for scale_OG, _ in grids])
    minimums_OG = torch.cat([minimum_OG for _, minimum_OG in grids])
    (scales_OG, minimums_OG), scale_bytes = _narrowed(torch.stack((scales_OG, minimums_OG)))
    return round_to_int4(weight_OI, scales_OG, minimums_OG, group_size, scale_bytes)


def quantize_int4_residual(weight_OI: Tensor, rounded: QuantizedWeight) -> QuantizedWeight:
    """Quantise the residual of an int4 weight to 4 more bits: together they are nearly as exact as int8."""
    residual = join_rows(
        [
            quantize_int4(weight_OI[rows].float() - rounded.rows(rows).dequantize(), rounded.shape.group_size)
            for rows in _rows_at_once(weight_OI)
        ]
    )
    # Both are read with the format of the weight.
    scale_bytes = max(residual.shape.scale_bytes, rounded.shape.scale_bytes)
    return replace(residual, shape=replace(residual.shape, scale_bytes=scale_bytes))


def _rows_at_once(weight_OI: Tensor) -> list[slice]:
    """Rows that are processed together, one after the other."""
    num_outputs, num_inputs = weight_OI.shape
    if weight_OI.is_meta:  # no search without values
        return [slice(num_outputs)]
    num_rows = max(1, (_ELEMENTS_ON_GPU if weight_OI.is_cuda else _ELEMENTS_AT_ONCE) // num_inputs)
    return [slice(first, first + num_rows) for first in range(0, num_outputs, num_rows)]


def _parts(weight_OI: Tensor) -> list[Tensor]:
    return [weight_OI[rows] for rows in _rows_at_once(weight_OI)]


def join_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate weights of one format along the output features."""
    values_OI = torch.cat([part.values_OI for part in parts])
    scale_bytes = max(part.shape.scale_bytes for part in parts)
    return QuantizedWeight(
        replace(parts[0].shape, output_size=len(values_OI), scale_bytes=scale_bytes),
        values_OI,
        torch.cat([part.scales_OG for part in parts]),
        torch.cat([part.minimums_OG for part in parts if part.minimums_OG is not None]),
    )


def round_to_int4(
    weight_OI: Tensor, scales_OG: Tensor, minimums_OG: Tensor, group_size: int, scale_bytes: int = 4
) -> QuantizedWeight:
    """Round to the nearest integers for these scales and minimums."""
    values_OI = _rounded(weight_OI, scales_OG, minimums_OG, group_size, (0, INT4_LEVELS - 1))
    return _weight(4, values_OI, scales_OG, minimums_OG, group_size, scale_bytes)


def round_to_e2m1(weight_OI: Tensor, scales_OG: Tensor, group_size: int) -> QuantizedWeight:
    """Restore a weight whose elements are E2M1 numbers times twice these scales. A group of zeros gets the scale 0.

    weight_OI: int8 for twice the numbers themselves.
    """
    are_numbers = weight_OI.dtype is torch.int8
    values_OGS = _groups(weight_OI, group_size) if are_numbers else _quotients(weight_OI, scales_OG, None, group_size)
    scales_OG = torch.where(_any_in_group(values_OGS), scales_OG, 0.0)
    scale_bytes = 1 if scales_OG.is_meta or _are_powers_of_two(scales_OG) else 4
    values_OI = values_OGS.flatten(1)[:, : weight_OI.shape[1]].to(torch.int8)
    return _weight(4, values_OI, scales_OG, None, group_size, scale_bytes)


def _any_in_group(values_OGS: Tensor) -> Tensor:
    """Whether a value of the group is not zero: bool [O, G]."""
    if values_OGS.dtype is torch.int8 and values_OGS.shape[2] % torch.int64.itemsize == 0:
        values_OGS = values_OGS.view(torch.int64)
    return values_OGS.any(dim=2)


def _are_powers_of_two(scales: Tensor) -> bool:
    """Whether all are zero or normal powers of two. scales: float32."""
    bits = scales.view(torch.int32)
    return bool(((bits & ~_EXPONENT_BITS == 0) & (bits != _EXPONENT_BITS)).all())


def _weight(
    bits: int,
    values_OI: Tensor,
    scales_OG: Tensor,
    minimums_OG: Tensor | None,
    group_size: int,
    scale_bytes: int,
) -> QuantizedWeight:
    num_outputs, num_inputs = values_OI.shape
    group_size = min(group_size, num_inputs)
    shape = QuantizedShape(bits, num_outputs, num_inputs, group_size, minimums_OG is not None, scale_bytes)
    return QuantizedWeight(shape, values_OI, scales_OG.float(), None if minimums_OG is None else minimums_OG.float())


def _rounded(
    weight_OI: Tensor, scales_OG: Tensor, minimums_OG: Tensor | None, group_size: int, limits: tuple[int, int]
) -> Tensor:
    """`_quotients` within limits: int8 [O, I]."""
    values_OI = torch.empty_like(weight_OI, dtype=torch.int8, memory_format=torch.contiguous_format)
    for rows in _rows_at_once(weight_OI):
        minimums = None if minimums_OG is None else minimums_OG[rows]
        quotients_OGS = _quotients(weight_OI[rows].float(), scales_OG[rows], minimums, group_size).clamp_(*limits)
        values_OI[rows] = quotients_OGS.flatten(1)[:, : weight_OI.shape[1]]
    return values_OI


def _quotients(weight_OI: Tensor, scales_OG: Tensor, minimums_OG: Tensor | None, group_size: int) -> Tensor:
    """(weight - minimum) / scale, rounded: [O, G, S]."""
    groups_OGS = _groups(weight_OI, group_size)
    if minimums_OG is not None:
        groups_OGS = groups_OGS - minimums_OG.float().unsqueeze(2)
    return (groups_OGS / _divisor(scales_OG).unsqueeze(2)).round_()


def _groups(weight_OI: Tensor, group_size: int) -> Tensor:
    """Reshape to [O, G, S]; the last group is padded with its last value, which does not change its range."""
    num_inputs = weight_OI.shape[1]
    group_size = min(group_size, num_inputs)
    missing = -num_inputs % group_size
    if missing:
        weight_OI = torch.cat((weight_OI, weight_OI[:, -1:].expand(-1, missing)), dim=1)
    return weight_OI.reshape(weight_OI.shape[0], -1, group_size)


def _narrowed(scales: Tensor) -> tuple[Tensor, int]:
    """Round scales to float16 values, on a CPU and where they are in range, and return their number of bytes."""
    if not is_on_cpu(scales):
        return scales, 4
    narrow = scales.half()
    if not scales.is_meta and not narrow.isfinite().all():
        return scales, 4
    return narrow.float(), 2


def _best_grid(groups_OGS: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums with the least squared error: of several ranges, each fitted to its integers."""
    # Which of two zeros is the smaller one depends on the machine: a sum with zero is never the negative one.
    low_OG, high_OG = groups_OGS.amin(dim=2) + 0.0, groups_OGS.amax(dim=2) + 0.0
    best_scale_OG, best_minimum_OG = (high_OG - low_OG) / (INT4_LEVELS - 1), low_OG
    if groups_OGS.is_meta:  # no search without values
        return best_scale_OG, best_minimum_OG
    least_OG = _squared_error(groups_OGS, best_scale_OG, best_minimum_OG)
    middle_OG, half_OG = (high_OG + low_OG) / 2, (high_OG - low_OG) / 2
    for share in _RANGES:
        grid = half_OG * (2 * share / (INT4_LEVELS - 1)), middle_OG - half_OG * share
        scale_OG, minimum_OG = _fitted(groups_OGS, *grid)
        error_OG = _squared_error(groups_OGS, scale_OG, minimum_OG)
        better_OG = error_OG < least_OG
        least_OG = torch.where(better_OG, error_OG, least_OG)
        best_scale_OG = torch.where(better_OG, scale_OG, best_scale_OG)
        best_minimum_OG = torch.where(better_OG, minimum_OG, best_minimum_OG)
    return best_scale_OG, best_minimum_OG


def _fitted(groups_OGS: Tensor, scale_OG: Tensor, minimum_OG: Tensor) -> tuple[Tensor, Tensor]:
    """Least-squares scale and minimum for the integers of a grid."""
    values_OGS = _values(groups_OGS, scale_OG, minimum_OG)
    group_size = groups_OGS.shape[2]
    mean_OG, weight_OG = _sum(values_OGS) / group_size, _sum(groups_OGS) / group_size
    centred_OGS = values_OGS - mean_OG.unsqueeze(2)
    variance_OG = _sum(centred_OGS.square())
    fitted_OG = _sum(centred_OGS * groups_OGS) / _divisor(variance_OG)
    fitted_OG = torch.where(variance_OG == 0, scale_OG, fitted_OG)
    return fitted_OG, weight_OG - fitted_OG * mean_OG


def _best_grid_with_zero_points(groups_OGS: Tensor) -> tuple[Tensor, Tensor]:
    """Scales, and minimums that are integer zero points times the scale, with the least squared error."""
    low_OG = groups_OGS.amin(dim=2).clamp_(max=0)
    high_OG = groups_OGS.amax(dim=2).clamp_(min=0)
    best_scale_OG, best_minimum_OG = _grid_with_zero_points(low_OG, high_OG)
    least_OG = _squared_error(groups_OGS, best_scale_OG, best_minimum_OG)
    for share in _RANGES[1:]:
        scale_OG, minimum_OG = _grid_with_zero_points(low_OG * share, high_OG * share)
        error_OG = _squared_error(groups_OGS, scale_OG, minimum_OG)
        better_OG = error_OG < least_OG
        least_OG = torch.where(better_OG, error_OG, least_OG)
        best_scale_OG = torch.where(better_OG, scale_OG, best_scale_OG)
        best_minimum_OG = torch.where(better_OG, minimum_OG, best_minimum_OG)
    return best_scale_OG, best_minimum_OG


def _grid_with_zero_points(low_OG: Tensor, high_OG: Tensor) -> tuple[Tensor, Tensor]:
    scale_OG = (high_OG - low_OG) / (INT4_LEVELS - 1)
    return scale_OG, minimums_of((-low_OG / _divisor(scale_OG)).round_(), scale_OG)


def _values(groups_OGS: Tensor, scale_OG: Tensor, minimum_OG: Tensor) -> Tensor:
    quotient_OGS = (groups_OGS - minimum_OG.unsqueeze(2)).div_(_divisor(scale_OG).unsqueeze(2))
    return quotient_OGS.round_().clamp_(0, INT4_LEVELS - 1)


def _squared_error(groups_OGS: Tensor, scale_OG: Tensor, minimum_OG: Tensor) -> Tensor:
    values_OGS = _values(groups_OGS, scale_OG, minimum_OG)
    rounded_OGS = values_OGS.mul_(scale_OG.unsqueeze(2)).add_(minimum_OG.unsqueeze(2))
    return _sum(rounded_OGS.sub_(groups_OGS).square_())


def _sum(numbers_OGS: Tensor) -> Tensor:
    """Sums of groups, added by halves: in one order on every machine, which torch does not promise. [O, G]."""
    while (size := numbers_OGS.shape[2]) > 1:
        half = -(-size // 2)
        rest_OGS = numbers_OGS[..., half:]
        numbers_OGS = numbers_OGS[..., :half] + (F.pad(rest_OGS, (0, 1)) if size % 2 else rest_OGS)
    return numbers_OGS.squeeze(2)


def _divisor(scales: Tensor) -> Tensor:
    """Replace zero scales, of groups that are all zero, to divide by."""
    return torch.where(scales == 0, 1.0, scales.float())
