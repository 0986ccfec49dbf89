"""Weights of 8 or 4 bits, and products with them: the specification in plain torch.

Activations are rounded row by row to integers of -127 to 127, so that sums of products are exact integers within a
group. Suffixes: T rows (tokens), I input features, O output features, G groups of input features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

INT8_LIMIT = 127
INT4_LEVELS = 16
# The kernels take 4-bit weights in runs of so many input features.
GROUP_MULTIPLE = 32
# Below this a row of activations is taken for zero: the inverse of its scale would not be finite.
_NEGLIGIBLE = 1e-30
# Values that are widened at once, to float64: 4 MiB. Large enough for products at full speed. The heap keeps all places
# that such values have been at; how many those are, one or four, depends on addresses and differs between processes.
_MAX_WIDENED = 1 << 19
# Rows that are multiplied at once, for which the weight is widened again.
_MAX_ROWS = 256
# Else the sums of many rows would take the most, where groups are small.
_MAX_OUTPUTS = 2048


@dataclass(frozen=True, slots=True)
class QuantizedShape:
    """bits: 8 or 4. group_size: input features that share a scale; the last group may have fewer.

    kernel_sizes: all four as the C++ kernels take them, where a group that is the whole row may be larger than that.
    """

    bits: int
    output_size: int
    input_size: int
    group_size: int
    kernel_sizes: tuple[int, int, int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        group_size = -(-self.group_size // GROUP_MULTIPLE) * GROUP_MULTIPLE
        object.__setattr__(self, "kernel_sizes", (self.bits, self.output_size, self.input_size, group_size))

    @property
    def num_groups(self) -> int:
        return -(-self.input_size // self.group_size)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight as integers: weight = (values - zeros) * scales.

    values_OI: int8; of 8 bits any, of 4 bits from 0 to 15. scales_OG: float32.
    zeros_OG: uint8; None for 8 bits. There is one group for 8 bits; for 4 bits its size is a multiple of 32, unless
    there is only one.
    """

    shape: QuantizedShape
    values_OI: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None = None

    def dequantize(self) -> Tensor:
        """float32 [O, I]."""
        centred_OI = self.values_OI.float()
        if self.zeros_OG is not None:
            centred_OI -= self._spread(self.zeros_OG.float())
        return centred_OI.mul_(self._spread(self.scales_OG))

    def rows(self, rows: Tensor | slice) -> QuantizedWeight:
        """Some rows, by their numbers: int64, or a slice."""

        def of(values_OX: Tensor) -> Tensor:
            return values_OX[rows] if isinstance(rows, slice) else values_OX.index_select(0, rows)

        values_RI = of(self.values_OI)
        return QuantizedWeight(
            QuantizedShape(self.shape.bits, values_RI.shape[0], self.shape.input_size, self.shape.group_size),
            values_RI,
            of(self.scales_OG),
            None if self.zeros_OG is None else of(self.zeros_OG),
        )

    def _spread(self, per_group_OG: Tensor) -> Tensor:
        if self.shape.num_groups == 1:
            return per_group_OG
        return per_group_OG.repeat_interleave(self.shape.group_size, dim=1)[:, : self.shape.input_size]


class QuantizedProducts(Protocol):
    """Who packs quantised weights and multiplies by them. Packed weights are opaque."""

    def pack(self, weight: QuantizedWeight) -> Tensor:
        """One tensor of bytes."""

    def unpack(self, packed: Tensor, shape: QuantizedShape) -> QuantizedWeight:
        """What was packed, bit for bit."""

    def linear(self, x_TI: Tensor, packed: Tensor, shape: QuantizedShape, bias_O: Tensor | None) -> Tensor:
        """x @ weight^T + bias, with x rounded to 8 bits row by row: float32, as many dimensions as x has."""

    def rows(self, ids_T: Tensor, packed: Tensor, shape: QuantizedShape, rest: Tensor | None = None) -> Tensor:
        """Rows of the weight, such as tokens' embeddings: float32 [T, I].

        rest: another packed weight of that shape, whose rows are added.
        """


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as integers, int8 [T, I], and their scales, float32 [T, 1]: x is about scale * integer.

    The scale of a row that holds what is not finite is not a number.
    """
    values_TI = torch.empty(x_TI.shape, dtype=torch.int8, device=x_TI.device)
    scale_T1 = torch.empty(x_TI.shape[0], 1, device=x_TI.device)
    for rows in _parts(x_TI.shape[0], _rows_at_once(x_TI.shape[1])):
        values_TI[rows], scale_T1[rows] = _quantize(x_TI[rows].float())
    return values_TI, scale_T1


def _quantize(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    largest_T1 = x_TI.abs().amax(dim=1, keepdim=True)
    is_zero_T1 = largest_T1 <= _NEGLIGIBLE
    # Of a number and a tensor, torch would multiply the number by the tensor's reciprocal, which is rounded twice.
    inverse_T1 = torch.where(is_zero_T1, 0.0, torch.full_like(largest_T1, INT8_LIMIT) / largest_T1)
    # In float64 the product is exact, so that it is rounded once.
    values_TI = x_TI.double().mul_(inverse_T1).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
    scale_T1 = torch.where(is_zero_T1, 0.0, largest_T1 / INT8_LIMIT)
    return values_TI, torch.where(largest_T1.isfinite(), scale_T1, torch.nan)


def quantized_linear_reference(x_TI: Tensor, weight: QuantizedWeight, bias_O: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias: float32 [T, O]. Never is more of the weight widened than `_outputs_at_once` says."""
    out_TO = torch.zeros(x_TI.shape[0], weight.shape.output_size, device=x_TI.device)
    for rows in _parts(x_TI.shape[0], _MAX_ROWS):
        _write_products(x_TI[rows], weight, out_TO[rows])
    return out_TO if bias_O is None else out_TO.add_(bias_O)


def _write_products(x_TI: Tensor, weight: QuantizedWeight, out_TO: Tensor) -> None:
    """out_TO: zeros, which become x @ weight^T."""
    shape = weight.shape
    values_TI, scale_T1 = quantize_rows(x_TI)
    for group in range(shape.num_groups):
        part = slice(group * shape.group_size, (group + 1) * shape.group_size)
        # Exact in float64, which has fast products everywhere.
        rows_TI = values_TI[:, part].double()
        for outputs in _parts(shape.output_size, _outputs_at_once(min(shape.group_size, shape.input_size))):
            weight_OI = weight.values_OI[outputs, part].double()
            sums_TO = rows_TI @ weight_OI.T
            if weight.zeros_OG is not None:
                zeros_1O = weight.zeros_OG[outputs, group].double().unsqueeze(0)
                sums_TO.addmm_(rows_TI.sum(dim=1, keepdim=True), zeros_1O, alpha=-1)
            out_TO[:, outputs] += sums_TO.float().mul_(weight.scales_OG[outputs, group])
            # Else they would still be there when the next ones are made.
            del weight_OI, sums_TO
        del rows_TI
    out_TO.mul_(scale_T1)


def _outputs_at_once(group_size: int) -> int:
    """Output features whose weights are widened at once, for one group of so many input features."""
    return max(1, min(_MAX_OUTPUTS, _MAX_WIDENED // group_size))


def _rows_at_once(num_inputs: int) -> int:
    """Rows of activations that are rounded at once."""
    return max(1, _MAX_WIDENED // num_inputs)


def _parts(size: int, part_size: int) -> Iterator[slice]:
    return (slice(first, first + part_size) for first in range(0, size, part_size))


class TorchQuantizedProducts:
    """The specification as it stands, where there are no C++ kernels. Slower than float32."""

    def pack(self, weight: QuantizedWeight) -> Tensor:
        parts = [weight.values_OI, weight.scales_OG, *([] if weight.zeros_OG is None else [weight.zeros_OG])]
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in reversed(parts)])

    def unpack(self, packed: Tensor, shape: QuantizedShape) -> QuantizedWeight:
        num_scales = shape.output_size * shape.num_groups
        num_zeros = num_scales if shape.bits == 4 else 0
        zeros, scales, values = packed.split([num_zeros, 4 * num_scales, shape.output_size * shape.input_size])
        return QuantizedWeight(
            shape,
            values.view(torch.int8).view(shape.output_size, shape.input_size),
            scales.clone().view(torch.float32).view(shape.output_size, -1),
            zeros.view(shape.output_size, -1) if num_zeros else None,
        )

    def linear(self, x_TI: Tensor, packed: Tensor, shape: QuantizedShape, bias_O: Tensor | None) -> Tensor:
        flat_TI = x_TI.reshape(-1, shape.input_size)
        out_TO = quantized_linear_reference(flat_TI, self.unpack(packed, shape), bias_O)
        return out_TO.view(*x_TI.shape[:-1], shape.output_size)

    def rows(self, ids_T: Tensor, packed: Tensor, shape: QuantizedShape, rest: Tensor | None = None) -> Tensor:
        rows_TI = self.unpack(packed, shape).rows(ids_T.long()).dequantize()
        return rows_TI if rest is None else rows_TI.add_(self.rows(ids_T, rest, shape))
