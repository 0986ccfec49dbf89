"""Int8, int4 and E2M1 weights on a GPU: weight-only, so that activations keep their dtype.

A packed weight is one tensor of bytes: the values, in rows of a multiple of 16 bytes, the scales, and for int4 the zero
points, all as `penstock.kernels.stored_weight` has them.
Suffixes: T rows (tokens), I input features, O output features, G groups of input features, B bytes of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import UnsupportedFeature
from penstock.kernels.quantized import QuantizedShape, QuantizedWeight, minimums_of
from penstock.kernels.stored_weight import E2M1, INT4, INT8, NIBBLE_TILE, StoredWeight, exponents_of, powers_of

_ALIGNMENT = 16
_MAX_ZERO_POINT = 255
# Rows from which the weight is dequantised for a product of floats, and its elements that are dequantised at once.
_MANY_ROWS, _MAX_DEQUANTIZED = 256, 1 << 26
# Twice the magnitudes of E2M1, by code without the sign.
_E2M1_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)


def weight_only_linear_reference(x_TI: Tensor, weight: QuantizedWeight, bias_O: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias in float32, rounded to x's dtype: the specification."""
    return F.linear(x_TI.float(), weight.dequantize(), None if bias_O is None else bias_O.float()).to(x_TI.dtype)


def _zero_points(weight: QuantizedWeight) -> Tensor | None:
    """Zero points of an int4 weight, uint8 [O, G]; None without. Raises UnsupportedFeature for other minimums."""
    shape, scales_OG, minimums_OG = weight.shape, weight.scales_OG, weight.minimums_OG
    if minimums_OG is None:
        return None
    if shape.bits == 8:
        raise UnsupportedFeature(
            "A weight of 8 bits whose groups have minimums is not supported on a GPU, where int8 is symmetric. Run it "
            "on a CPU (device='cpu'), or take a checkpoint in bfloat16."
        )
    zeros_OG = (minimums_OG / -torch.where(scales_OG == 0, 1.0, scales_OG)).round_()
    if not minimums_OG.is_meta:
        restored_OG = minimums_of(zeros_OG, scales_OG)
        if not torch.equal(restored_OG, minimums_OG.float()) or bool(
            ((zeros_OG < 0) | (zeros_OG > _MAX_ZERO_POINT)).any()
        ):
            raise UnsupportedFeature(
                "A weight of 4 bits whose groups have minimums instead of integer zero points is not supported on a "
                "GPU. Run it on a CPU (device='cpu'), or take a checkpoint in bfloat16."
            )
    return zeros_OG.to(torch.uint8)


class GpuQuantizedProducts:
    """Triton kernels for up to `_MANY_ROWS` rows; cuBLAS with dequantised parts of the weight for more.

    is_invariant: one kernel for any number of rows, of which none depends on another.
    """

    keeps_dtype = True

    def __init__(self, *, is_invariant: bool = False) -> None:
        self._is_invariant = is_invariant

    def pack(self, weight: QuantizedWeight) -> Tensor:
        values_OI, scales_OG, zeros_OG = weight.values_OI, weight.scales_OG.float(), _zero_points(weight)
        if weight.shape.bits == 8:
            values_OB = F.pad(values_OI, (0, -values_OI.shape[1] % _ALIGNMENT)).contiguous().view(torch.uint8)
        else:
            codes_OI = _codes(values_OI) if weight.shape.is_e2m1 else values_OI.to(torch.uint8)
            padded_OI = F.pad(codes_OI, (0, -codes_OI.shape[1] % (2 * NIBBLE_TILE)))
            tiles = padded_OI.view(padded_OI.shape[0], -1, 2, NIBBLE_TILE)
            values_OB = tiles[:, :, 0] | (tiles[:, :, 1] << 4)
        scales = exponents_of(scales_OG) if _has_exponents(weight.shape) else scales_OG
        parts = [values_OB, scales, *([] if zeros_OG is None else [zeros_OG])]
        return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])

    def unpack(self, packed: Tensor, shape: QuantizedShape) -> QuantizedWeight:
        weight = stored_weight(packed, shape)
        if weight.form == INT8:
            values_OI = weight.values.view(torch.int8)
        else:
            tiles = weight.values.view(shape.output_size, -1, 1, NIBBLE_TILE)
            codes_OI = torch.cat([tiles & 15, tiles >> 4], dim=2).flatten(1)
            values_OI = _values_of_codes(codes_OI) if shape.is_e2m1 else codes_OI.to(torch.int8)
        values_OI = values_OI[:, : shape.input_size].contiguous()
        scales_OG, zeros_OG = weight.scales_OG, weight.zeros_OG
        assert scales_OG is not None, "packed weights have scales"
        if scales_OG.dtype is torch.uint8:
            scales_OG = powers_of(scales_OG)
        minimums_OG = None if zeros_OG is None else minimums_of(zeros_OG, scales_OG)
        return QuantizedWeight(shape, values_OI, scales_OG, minimums_OG)

    def linear(self, x_TI: Tensor, packed: Tensor, shape: QuantizedShape, bias_O: Tensor | None) -> Tensor:
        """x @ weight^T + bias in x's dtype, with the leading dimensions of x."""
        result_shape = (*x_TI.shape[:-1], shape.output_size)
        if x_TI.is_meta:
            return x_TI.new_empty(result_shape)
        from penstock.kernels.triton.stored_weight import dequantize, stored_linear

        flat_TI, weight = x_TI.reshape(-1, shape.input_size).contiguous(), stored_weight(packed, shape)
        if len(flat_TI) <= _MANY_ROWS or self._is_invariant:
            return stored_linear(flat_TI, weight, bias_O, is_invariant=self._is_invariant).view(result_shape)
        result_TO = x_TI.new_empty(len(flat_TI), shape.output_size)
        num_outputs = max(1, _MAX_DEQUANTIZED // shape.input_size)
        for begin in range(0, shape.output_size, num_outputs):
            part = slice(begin, begin + num_outputs)
            weight_OI = dequantize(weight.outputs(part), x_TI.dtype)
            bias = None if bias_O is None else bias_O[part].to(x_TI.dtype)
            result_TO[:, part] = F.linear(flat_TI, weight_OI, bias)
        return result_TO.view(result_shape)

    def rows(self, ids_T: Tensor, packed: Tensor, shape: QuantizedShape, rest: Tensor | None = None) -> Tensor:
        if packed.is_meta:
            return torch.empty(len(ids_T), shape.input_size, dtype=torch.float32, device=packed.device)
        from penstock.kernels.triton.stored_weight import dequantize

        rows_TI = dequantize(stored_weight(packed, shape), torch.float32, ids_T)
        return rows_TI if rest is None else rows_TI.add_(self.rows(ids_T, rest, shape))


def stored_weight(packed: Tensor, shape: QuantizedShape) -> StoredWeight:
    """Views of a packed weight."""
    num_outputs, num_groups = shape.output_size, shape.num_groups
    form = INT8 if shape.bits == 8 else E2M1 if shape.is_e2m1 else INT4
    row_bytes = shape.input_size if form == INT8 else -(-shape.input_size // (2 * NIBBLE_TILE)) * NIBBLE_TILE
    row_bytes = -(-row_bytes // _ALIGNMENT) * _ALIGNMENT
    num_scales, scale_dtype = num_outputs * num_groups, torch.uint8 if _has_exponents(shape) else torch.float32
    sizes = num_outputs * row_bytes, num_scales * scale_dtype.itemsize, num_scales if form == INT4 else 0
    values, scales, zeros = packed.split(sizes)
    return StoredWeight(
        form,
        values.view(num_outputs, row_bytes),
        shape.input_size,
        shape.group_size,
        scales.view(scale_dtype).view(num_outputs, num_groups),
        zeros.view(num_outputs, num_groups) if form == INT4 else None,
    )


def _has_exponents(shape: QuantizedShape) -> bool:
    """Whether scales are zeros and powers of two, which are stored by their exponents."""
    return shape.is_e2m1 and shape.scale_bytes == 1


def _codes(values_OI: Tensor) -> Tensor:
    """E2M1 codes of twice the numbers: uint8."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, device=values_OI.device)
    indices_OI = torch.searchsorted(magnitudes, values_OI.abs().long())
    return (indices_OI + 8 * (values_OI < 0)).to(torch.uint8)


def _values_of_codes(codes_OI: Tensor) -> Tensor:
    """Twice the numbers of E2M1 codes: int8."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, dtype=torch.int8, device=codes_OI.device)
    magnitudes_OI = magnitudes[(codes_OI & 7).int()]
    return torch.where(codes_OI >= 8, -magnitudes_OI, magnitudes_OI)
