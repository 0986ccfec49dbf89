"""Int8, int4 and E2M1 weights, and products with them: the specification in plain torch.

Activations are quantised in groups of 32 to integers of -127 to 127, so that sums of products are exact within a group.
Suffixes: T rows (tokens), I input features, O output features, G groups of input features, S input features of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

INT8_LIMIT = 127
INT4_LEVELS = 16
# Activations that share a scale; group sizes of weights are multiples of it, or half of it.
GROUP_MULTIPLE = 32
HALF_GROUP = 16
# A group of activations below this is quantised to zeros: the inverse of its scale would not be finite.
_NEGLIGIBLE = 1e-30
# Activations quantised at once.
_MAX_WIDENED = 1 << 19
# Activation rows per pass over the weight.
_MAX_ROWS = 256
# Limits the memory of many rows' sums.
_MAX_OUTPUTS = 2048


@dataclass(frozen=True, slots=True)
class QuantizedShape:
    """bits: 8 or 4. group_size: input features that share a scale; the last group may be smaller.

    has_minimums: whether a group has a minimum too; 4 bits without are floats (E2M1). scale_bytes: 2 for scales and
    minimums that are float16 values, 1 for scales that are zero or powers of two, else 4. kernel_sizes: arguments of
    the C++ kernels, where a group of the whole row may be larger than it.
    """

    bits: int
    output_size: int
    input_size: int
    group_size: int
    has_minimums: bool = False
    scale_bytes: int = 4
    kernel_sizes: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        group_size = -(-self.group_size // GROUP_MULTIPLE) * GROUP_MULTIPLE
        if self.group_size == HALF_GROUP and self.num_groups > 1:
            group_size = HALF_GROUP
        sizes = (self.bits, self.output_size, self.input_size, group_size, int(self.has_minimums), self.scale_bytes)
        object.__setattr__(self, "kernel_sizes", sizes)

    @property
    def description(self) -> str:
        """Format in words, such as "8 bits in groups of 32"."""
        if self.is_e2m1:
            return f"floats of 4 bits (E2M1) in groups of {self.group_size}"
        groups = f"{self.bits} bits in groups of {self.group_size}"
        return f"{groups} with minimums" if self.has_minimums else groups

    @property
    def is_e2m1(self) -> bool:
        """Whether the values are floats of 4 bits."""
        return self.bits == 4 and not self.has_minimums

    @property
    def num_groups(self) -> int:
        return -(-self.input_size // self.group_size)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantised weight: weight = values * scales + minimums.

    values_OI: int8; with minimums from 0 to 127, for int4 to 15; of E2M1 twice the numbers. scales_OG: float32.
    minimums_OG: float32; None without. A group size is 16 or a multiple of 32, unless there is only one group.
    """

    shape: QuantizedShape
    values_OI: Tensor
    scales_OG: Tensor
    minimums_OG: Tensor | None = None

    def dequantize(self) -> Tensor:
        """float32 [O, I]."""
        weight_OI = self.values_OI.float().mul_(self._spread(self.scales_OG))
        return weight_OI if self.minimums_OG is None else weight_OI.add_(self._spread(self.minimums_OG))

    def rows(self, rows: Tensor | slice) -> QuantizedWeight:
        """Select rows: int64 indices, or a slice."""

        def of(values_OX: Tensor) -> Tensor:
            return values_OX[rows] if isinstance(rows, slice) else values_OX.index_select(0, rows)

        values_RI = of(self.values_OI)
        return QuantizedWeight(
            replace(self.shape, output_size=values_RI.shape[0]),
            values_RI,
            of(self.scales_OG),
            None if self.minimums_OG is None else of(self.minimums_OG),
        )

    def _spread(self, per_group_OG: Tensor) -> Tensor:
        if self.shape.num_groups == 1:
            return per_group_OG
        return per_group_OG.repeat_interleave(self.shape.group_size, dim=1)[:, : self.shape.input_size]


def minimums_of(zeros_OG: Tensor, scales_OG: Tensor) -> Tensor:
    """Minimums of groups with zero points: weight = (values - zeros) * scales. Float32 [O, G]."""
    return zeros_OG.float() * -scales_OG.float()


class QuantizedProducts(Protocol):
    """Packing of quantised weights and products with them. Packed weights are opaque.

    keeps_dtype: whether `linear` takes activations as they are, and returns their dtype; otherwise both are float32.
    """

    keeps_dtype: bool

    def pack(self, weight: QuantizedWeight) -> Tensor:
        """Pack into one tensor of bytes."""

    def unpack(self, packed: Tensor, shape: QuantizedShape) -> QuantizedWeight:
        """Restore the packed weight bit for bit."""

    def linear(self, x_TI: Tensor, packed: Tensor, shape: QuantizedShape, bias_O: Tensor | None) -> Tensor:
        """x @ weight^T + bias, with the leading dimensions of x, which may be quantised to int8."""

    def rows(self, ids_T: Tensor, packed: Tensor, shape: QuantizedShape, rest: Tensor | None = None) -> Tensor:
        """Look up rows of the weight, such as embeddings: float32 [T, I].

        rest: packed residual of the same shape, whose rows are added.
        """


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to int8 [T, I] with a scale per group of 32, float32 [T, G]: x is about scale * integer.

    A group with a value that is not finite has the scale NaN.
    """
    num_rows, num_inputs = x_TI.shape
    values_TI = torch.empty(x_TI.shape, dtype=torch.int8, device=x_TI.device)
    scales_TG = torch.empty(num_rows, -(-num_inputs // GROUP_MULTIPLE), device=x_TI.device)
    for rows in _parts(num_rows, _rows_at_once(num_inputs)):
        x_TGS = F.pad(x_TI[rows].float(), (0, -num_inputs % GROUP_MULTIPLE)).unflatten(1, (-1, GROUP_MULTIPLE))
        values_TGS, scales_TG[rows] = _quantize(x_TGS)
        values_TI[rows] = values_TGS.flatten(1)[:, :num_inputs]
    return values_TI, scales_TG


def _quantize(x_TGS: Tensor) -> tuple[Tensor, Tensor]:
    largest_TG = x_TGS.abs().amax(dim=2)
    is_zero_TG = largest_TG <= _NEGLIGIBLE
    # Torch computes number / tensor by the reciprocal, which rounds twice.
    inverse_TG = torch.where(is_zero_TG, 0.0, torch.full_like(largest_TG, INT8_LIMIT) / largest_TG)
    # In float64 the product is exact, so it is rounded once.
    values_TGS = x_TGS.double().mul_(inverse_TG.unsqueeze(2)).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
    scales_TG = torch.where(is_zero_TG, 0.0, largest_TG / INT8_LIMIT)
    return values_TGS, torch.where(largest_TG.isfinite(), scales_TG, torch.nan)


def quantized_linear_reference(x_TI: Tensor, weight: QuantizedWeight, bias_O: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias: float32 [T, O]. Dequantises at most `_MAX_OUTPUTS` outputs at a time."""
    out_TO = torch.zeros(x_TI.shape[0], weight.shape.output_size, device=x_TI.device)
    for rows in _parts(x_TI.shape[0], _MAX_ROWS):
        _write_products(x_TI[rows], weight, out_TO[rows])
    return out_TO if bias_O is None else out_TO.add_(bias_O)


def _write_products(x_TI: Tensor, weight: QuantizedWeight, out_TO: Tensor) -> None:
    """Add x @ weight^T to out_TO, which is zero before."""
    values_TI, scales_TG = quantize_rows(x_TI)
    for part in _parts(weight.shape.input_size, min(GROUP_MULTIPLE, weight.shape.group_size)):
        group, of_weight = part.start // GROUP_MULTIPLE, part.start // weight.shape.group_size
        # Exact in float64, for which BLAS is fast everywhere.
        rows_TS, scale_T1 = values_TI[:, part].double(), scales_TG[:, group : group + 1]
        for outputs in _parts(weight.shape.output_size, _MAX_OUTPUTS):
            sums_TO = rows_TS @ weight.values_OI[outputs, part].double().T
            out_TO[:, outputs] += sums_TO.float().mul_(scale_T1 * weight.scales_OG[outputs, of_weight])
            if weight.minimums_OG is not None:
                sum_T1 = rows_TS.sum(dim=1, keepdim=True).float().mul_(scale_T1)
                out_TO[:, outputs] += sum_T1 * weight.minimums_OG[outputs, of_weight]


def _rows_at_once(num_inputs: int) -> int:
    """Rows of activations that are quantised at once."""
    return max(1, _MAX_WIDENED // num_inputs)


def _parts(size: int, part_size: int) -> Iterator[slice]:
    return (slice(first, first + part_size) for first in range(0, size, part_size))


class TorchQuantizedProducts:
    """The specification, for a machine without the C++ kernels. Slower than float32."""

    keeps_dtype = False

    def pack(self, weight: QuantizedWeight) -> Tensor:
        parts = [weight.scales_OG, *([] if weight.minimums_OG is None else [weight.minimums_OG]), weight.values_OI]
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])

    def unpack(self, packed: Tensor, shape: QuantizedShape) -> QuantizedWeight:
        num_bytes = 4 * shape.output_size * shape.num_groups
        sizes = [num_bytes, num_bytes if shape.has_minimums else 0, shape.output_size * shape.input_size]
        scales, minimums, values = packed.split(sizes)
        return QuantizedWeight(
            shape,
            values.view(torch.int8).view(shape.output_size, shape.input_size),
            scales.view(torch.float32).view(shape.output_size, -1),
            minimums.view(torch.float32).view(shape.output_size, -1) if shape.has_minimums else None,
        )

    def linear(self, x_TI: Tensor, packed: Tensor, shape: QuantizedShape, bias_O: Tensor | None) -> Tensor:
        flat_TI = x_TI.reshape(-1, shape.input_size)
        out_TO = quantized_linear_reference(flat_TI, self.unpack(packed, shape), bias_O)
        return out_TO.view(*x_TI.shape[:-1], shape.output_size)

    def rows(self, ids_T: Tensor, packed: Tensor, shape: QuantizedShape, rest: Tensor | None = None) -> Tensor:
        rows_TI = self.unpack(packed, shape).rows(ids_T.long()).dequantize()
        return rows_TI if rest is None else rows_TI.add_(self.rows(ids_T, rest, shape))
