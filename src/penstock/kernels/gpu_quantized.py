"""Int8 and int4 weights on a GPU: weight-only, so that activations keep their dtype.

A packed weight is one tensor of bytes: the values, the scales in float32, and for int4 the zero points. Values are
[O, B], uint8, in rows of a multiple of 16 bytes. A row of int4 has tiles of 256 inputs in 128 bytes: byte b of a tile
holds input b in its low half, and input b + 128 in its high half.
Suffixes: T rows (tokens), I input features, O output features, G groups of input features, B bytes of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import UnsupportedFeature
from penstock.kernels.quantized import QuantizedShape, QuantizedWeight, minimums_of

_TILE_BYTES, _ALIGNMENT = 128, 16
_MAX_ZERO_POINT = 255
# Rows from which the weight is dequantised for a product of floats, and its elements that are dequantised at once.
_MANY_ROWS, _MAX_DEQUANTIZED = 256, 1 << 26


def weight_only_linear_reference(x_TI: Tensor, weight: QuantizedWeight, bias_O: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias in float32, rounded to x's dtype: the specification."""
    return F.linear(x_TI.float(), weight.dequantize(), None if bias_O is None else bias_O.float()).to(x_TI.dtype)


class _Parts(NamedTuple):
    """Views of a packed weight. zeros_OG: None for int8."""

    values_OB: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None

    def outputs(self, part: slice) -> _Parts:
        zeros_OG = None if self.zeros_OG is None else self.zeros_OG[part]
        return _Parts(self.values_OB[part], self.scales_OG[part], zeros_OG)


def _zero_points(weight: QuantizedWeight) -> Tensor | None:
    """Zero points of an int4 weight, uint8 [O, G]; None for int8. Raises UnsupportedFeature for other formats."""
    shape, scales_OG, minimums_OG = weight.shape, weight.scales_OG, weight.minimums_OG
    if shape.bits == 8 and (minimums_OG is not None or shape.num_groups > 1):
        raise UnsupportedFeature(
            f"A weight of 8 bits with groups of {shape.group_size} of {shape.input_size} inputs is not supported on a "
            "GPU, where int8 has one scale per output feature and no minimum. Run it on a CPU (device='cpu'), or take "
            "a checkpoint in bfloat16."
        )
    if shape.is_e2m1:
        raise UnsupportedFeature(
            "A weight of 4-bit floats (E2M1) is not supported on a GPU. Run it on a CPU (device='cpu'), or dequantise "
            "it with quantization='none'."
        )
    if minimums_OG is None:
        return None
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
        values_OI, zeros_OG = weight.values_OI, _zero_points(weight)
        if zeros_OG is None:
            values_OB = F.pad(values_OI, (0, -values_OI.shape[1] % _ALIGNMENT)).contiguous().view(torch.uint8)
            parts = [values_OB, weight.scales_OG.float()]
        else:
            padded_OI = F.pad(values_OI, (0, -values_OI.shape[1] % (2 * _TILE_BYTES))).to(torch.uint8)
            tiles = padded_OI.view(padded_OI.shape[0], -1, 2, _TILE_BYTES)
            parts = [tiles[:, :, 0] | (tiles[:, :, 1] << 4), weight.scales_OG.float(), zeros_OG]
        return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])

    def unpack(self, packed: Tensor, shape: QuantizedShape) -> QuantizedWeight:
        values_OB, scales_OG, zeros_OG = _parts(packed, shape)
        if zeros_OG is None:
            values_OI = values_OB.view(torch.int8)
        else:
            tiles = values_OB.view(shape.output_size, -1, 1, _TILE_BYTES)
            values_OI = torch.cat([tiles & 15, tiles >> 4], dim=2).flatten(1).to(torch.int8)
        minimums_OG = None if zeros_OG is None else minimums_of(zeros_OG, scales_OG)
        return QuantizedWeight(shape, values_OI[:, : shape.input_size].contiguous(), scales_OG, minimums_OG)

    def linear(self, x_TI: Tensor, packed: Tensor, shape: QuantizedShape, bias_O: Tensor | None) -> Tensor:
        """x @ weight^T + bias in x's dtype, with the leading dimensions of x."""
        result_shape = (*x_TI.shape[:-1], shape.output_size)
        if x_TI.is_meta:
            return x_TI.new_empty(result_shape)
        from penstock.kernels.triton.quantized import quantized_linear

        flat_TI, parts = x_TI.reshape(-1, shape.input_size).contiguous(), _parts(packed, shape)
        if len(flat_TI) <= _MANY_ROWS or self._is_invariant:
            rows = flat_TI, *parts, shape.group_size, bias_O
            return quantized_linear(*rows, is_invariant=self._is_invariant).view(result_shape)
        result_TO = x_TI.new_empty(len(flat_TI), shape.output_size)
        num_outputs = max(1, _MAX_DEQUANTIZED // shape.input_size)
        for begin in range(0, shape.output_size, num_outputs):
            part = slice(begin, begin + num_outputs)
            weight_OI = _dequantize(parts.outputs(part), shape, x_TI.dtype)
            bias = None if bias_O is None else bias_O[part].to(x_TI.dtype)
            result_TO[:, part] = F.linear(flat_TI, weight_OI, bias)
        return result_TO.view(result_shape)

    def rows(self, ids_T: Tensor, packed: Tensor, shape: QuantizedShape, rest: Tensor | None = None) -> Tensor:
        if packed.is_meta:
            return torch.empty(len(ids_T), shape.input_size, dtype=torch.float32, device=packed.device)
        rows_TI = _dequantize(_parts(packed, shape), shape, torch.float32, ids_T)
        return rows_TI if rest is None else rows_TI.add_(self.rows(ids_T, rest, shape))


def _parts(packed: Tensor, shape: QuantizedShape) -> _Parts:
    num_outputs, num_groups = shape.output_size, shape.num_groups
    per_tile = 2 * _TILE_BYTES
    is_int4 = shape.bits == 4
    row_bytes = -(-shape.input_size // per_tile) * _TILE_BYTES if is_int4 else shape.input_size
    row_bytes = -(-row_bytes // _ALIGNMENT) * _ALIGNMENT
    num_scales = num_outputs * num_groups
    values, scales, zeros = packed.split([num_outputs * row_bytes, 4 * num_scales, num_scales if is_int4 else 0])
    return _Parts(
        values.view(num_outputs, row_bytes),
        scales.view(torch.float32).view(num_outputs, num_groups),
        zeros.view(num_outputs, num_groups) if is_int4 else None,
    )


def _dequantize(parts: _Parts, shape: QuantizedShape, dtype: torch.dtype, ids_T: Tensor | None = None) -> Tensor:
    from penstock.kernels.triton.quantized import dequantize

    return dequantize(*parts, shape.group_size, shape.input_size, dtype, ids_T)
