"""Products with a weight in any format of `penstock.kernels.stored_weight`, dequantised in registers.

`product` and `dequantized` are the device functions of all formats, which dense and grouped products share.
Suffixes: T rows (tokens), I input features, O output features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.stored_weight import FLOAT8, NIBBLE_TILE, NIBBLES, PLAIN, StoredWeight

# Rows whose tiling batch-invariant products take for any number of rows.
MANY_ROWS = 64
# Elements of a program of `dequantize`.
_ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows and output features of a tile, elements of a stored row that are read at once, and the launch parameters.

    scaling: where scales are multiplied: "none" for plain floats, sums of whole rows ("outputs"), sums of a tile
    ("tiles"), or the values themselves ("values"), whose results are rounded to the dtype of the other operand.
    """

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    scaling: str

    @property
    def options(self) -> dict[str, object]:
        """Arguments of the kernels."""
        return {
            "SCALING": self.scaling,
            "ROWS": self.rows,
            "OUTPUTS": self.outputs,
            "INPUTS": self.inputs,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def choose_tiling(num_rows: int, dtype: torch.dtype, weight: StoredWeight) -> Tiling:
    """Tiling for so many rows, within 99 KiB of shared memory.

    Few rows: bound by reading the weight, so many programs. Scales of several groups in a tile take shared memory too.
    """
    inputs, scaling = _inputs_of_tile(dtype, weight)
    if dtype is torch.float32:  # without tensor cores: operands take registers
        return Tiling(16 if num_rows <= 16 else 32, 32, inputs, 4, 2, scaling)
    has_many_scales = scaling == "values"
    if weight.form == PLAIN:
        if num_rows > MANY_ROWS:
            return Tiling(128, 128, inputs, 8, 2, scaling)
        rows = max(16, triton.next_power_of_2(num_rows))
        return Tiling(rows, 128 if rows == MANY_ROWS else 64, inputs, 4, 3, scaling)
    if num_rows <= 16:
        return Tiling(16, 32, inputs, 4, 2 if has_many_scales else 4, scaling)
    if num_rows <= 32 or has_many_scales:
        return Tiling(32, 32, inputs, 4, 2, scaling) if has_many_scales else Tiling(32, 64, inputs, 4, 3, scaling)
    return Tiling(64, 64, inputs, 4, 2 if inputs > 64 else 3, scaling)


def _inputs_of_tile(dtype: torch.dtype, weight: StoredWeight) -> tuple[int, str]:
    """Elements of a stored row that are read at once, and the scaling."""
    if weight.form == PLAIN:
        return 32 if dtype is torch.float32 else 64, "none"
    is_one_group = weight.num_groups == 1
    inputs = NIBBLE_TILE
    if weight.form == FLOAT8:
        inputs = 64 if weight.group_size % 64 == 0 or is_one_group else 32
    if is_one_group:
        return inputs, "outputs"
    return inputs, "tiles" if weight.group_size % inputs == 0 else "values"


def sizes_of(weight: StoredWeight) -> tuple[int, int, int, int]:
    """Arguments of the kernels: inputs, elements of a stored row, groups of a row, and inputs of a group."""
    return weight.num_inputs, weight.values.shape[1], weight.num_groups, weight.group_size


def stored_linear(
    x_TI: Tensor, weight: StoredWeight, bias_O: Tensor | None = None, *, is_invariant: bool = False
) -> Tensor:
    """x @ weight^T + bias in float32, rounded to x's dtype: [T, O]. x is contiguous.

    is_invariant: the tiling of many rows for any number of them.
    """
    num_rows, num_outputs = x_TI.shape[0], weight.values.shape[0]
    result_TO = x_TI.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return result_TO
    tiling = choose_tiling(MANY_ROWS if is_invariant else num_rows, x_TI.dtype, weight)
    _product_kernel[(triton.cdiv(num_outputs, tiling.outputs), triton.cdiv(num_rows, tiling.rows))](
        x_TI,
        weight.values,
        weight.values if weight.scales_OG is None else weight.scales_OG,
        weight.values if weight.zeros_OG is None else weight.zeros_OG,
        result_TO if bias_O is None else bias_O,
        result_TO,
        num_rows,
        num_outputs,
        *sizes_of(weight),
        FORM=weight.form,
        HAS_BIAS=bias_O is not None,
        **tiling.options,
    )
    return result_TO


def dequantize(weight: StoredWeight, dtype: torch.dtype, ids_R: Tensor | None = None) -> Tensor:
    """Dequantise all rows of a weight, or these: [R, I]. ids_R: int32 or int64, within the weight."""
    assert weight.form not in (PLAIN, FLOAT8), "floats are converted by torch"
    num_rows = weight.values.shape[0] if ids_R is None else ids_R.shape[0]
    result_RI = torch.empty(num_rows, weight.num_inputs, dtype=dtype, device=weight.values.device)
    if num_rows == 0:
        return result_RI
    _dequantize_kernel[(num_rows, triton.cdiv(weight.num_inputs, _ELEMENTS))](
        weight.values,
        weight.scales_OG,
        weight.values if weight.zeros_OG is None else weight.zeros_OG,
        weight.values if ids_R is None else ids_R,
        result_RI,
        *sizes_of(weight),
        FORM=weight.form,
        IN_NIBBLES=weight.form in NIBBLES,
        HAS_IDS=ids_R is not None,
        TILE=NIBBLE_TILE,
        ELEMENTS=_ELEMENTS,
        num_warps=4,
    )
    return result_RI


@triton.jit
def _numbers(stored, zeros, place, FORM: tl.constexpr):
    """Integers of a format without their scales, in float32; floats as they are stored. place: of the zero points."""
    if FORM == "int8":
        numbers = stored.to(tl.int8, bitcast=True).to(tl.float32)
    elif FORM == "int4":
        numbers = stored.to(tl.float32) - tl.load(zeros + place).to(tl.float32)
    elif FORM == "e2m1":
        # Twice the number: the mantissa below the first binade, and above it with its leading bit, shifted.
        code = stored.to(tl.int32)
        exponent = (code >> 1) & 3
        twice = tl.where(exponent == 0, code & 1, (2 + (code & 1)) << tl.maximum(exponent - 1, 0))
        numbers = tl.where((code & 8) != 0, -twice, twice).to(tl.float32)
    else:
        numbers = stored
    return numbers


@triton.jit
def _scales(scales, place):
    """Scales in float32, or powers of two by their exponents."""
    scale = tl.load(scales + place)
    if scales.dtype.element_ty == tl.uint8:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _add_tile(
    total,
    stored,
    x_row,
    is_row,
    scales,
    zeros,
    feature,
    first_input,
    num_inputs,
    num_groups,
    group_size,
    FORM: tl.constexpr,
    SCALING: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Add the products of INPUTS inputs, from `first_input` on, with the stored values [INPUTS, outputs]."""
    column = first_input + tl.arange(0, INPUTS)
    rows = tl.load(x_row + column[None, :], mask=is_row[:, None] & (column < num_inputs)[None, :], other=0.0)
    of_feature = feature.to(tl.int64)[None, :] * num_groups
    if SCALING == "values":
        place = of_feature + tl.minimum(column // group_size, num_groups - 1)[:, None]
        weights = _numbers(stored, zeros, place, FORM) * _scales(scales, place)
        total = tl.dot(rows, weights.to(rows.dtype), total, input_precision="ieee")
    elif SCALING == "tiles":
        place = of_feature + tl.minimum(first_input // group_size, num_groups - 1)
        weights = _numbers(stored, zeros, place, FORM).to(rows.dtype)
        total += tl.dot(rows, weights, input_precision="ieee") * _scales(scales, place)
    else:
        weights = _numbers(stored, zeros, of_feature, FORM).to(rows.dtype)
        total = tl.dot(rows, weights, total, input_precision="ieee")
    return total


@triton.jit
def product(
    x_row,
    is_row,
    values,
    scales,
    zeros,
    feature,
    num_inputs,
    row_size,
    num_groups,
    group_size,
    FORM: tl.constexpr,
    SCALING: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Products of rows with some output features of a weight: float32 [ROWS, OUTPUTS].

    x_row: pointers to the rows [ROWS, 1]. feature: [OUTPUTS], within the weight. row_size: elements of a stored row.
    """
    weight_row = values + feature.to(tl.int64)[None, :] * row_size
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    offset = tl.arange(0, INPUTS)
    for start in range(0, row_size, INPUTS):
        place = start + offset
        if FORM == "int4" or FORM == "e2m1":
            both = tl.load(weight_row + place[:, None])
            for half in tl.static_range(2):
                total = _add_tile(
                    total,
                    (both >> 4) if half == 1 else (both & 15),
                    x_row,
                    is_row,
                    scales,
                    zeros,
                    feature,
                    2 * start + half * INPUTS,
                    num_inputs,
                    num_groups,
                    group_size,
                    FORM,
                    SCALING,
                    INPUTS,
                )
        else:
            stored = tl.load(weight_row + place[:, None], mask=(place < row_size)[:, None], other=0.0)
            total = _add_tile(
                total,
                stored,
                x_row,
                is_row,
                scales,
                zeros,
                feature,
                start,
                num_inputs,
                num_groups,
                group_size,
                FORM,
                SCALING,
                INPUTS,
            )
    if SCALING == "outputs":
        total *= _scales(scales, feature)[None, :]
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x,
    values,
    scales,
    zeros,
    bias,
    result,
    num_rows,
    num_outputs,
    num_inputs,
    row_size,
    num_groups,
    group_size,
    FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALING: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """A tile of rows and output features."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # Outputs beyond the last repeat the last, and are not stored.
    feature = tl.minimum(output, num_outputs - 1)
    is_row = row < num_rows
    total = product(
        x + row.to(tl.int64)[:, None] * num_inputs,
        is_row,
        values,
        scales,
        zeros,
        feature,
        num_inputs,
        row_size,
        num_groups,
        group_size,
        FORM,
        SCALING,
        ROWS,
        OUTPUTS,
        INPUTS,
    )
    if HAS_BIAS:
        total += tl.load(bias + feature).to(tl.float32)[None, :]
    place = result + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(place, total.to(result.dtype.element_ty), mask=is_row[:, None] & (output < num_outputs)[None, :])


@triton.jit
def _dequantize_kernel(
    values,
    scales,
    zeros,
    ids,
    result,
    num_inputs,
    row_size,
    num_groups,
    group_size,
    FORM: tl.constexpr,
    IN_NIBBLES: tl.constexpr,
    HAS_IDS: tl.constexpr,
    TILE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Some input features of one row."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_IDS:
        source = tl.load(ids + row).to(tl.int64)
    column = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_input = column < num_inputs
    if IN_NIBBLES:
        within = column % (2 * TILE)
        place = source * row_size + (column // (2 * TILE)) * TILE + within % TILE
        both = tl.load(values + place, mask=is_input, other=0)
        stored = tl.where(within >= TILE, both >> 4, both & 15)
    else:
        stored = tl.load(values + source * row_size + column, mask=is_input, other=0)
    group = source * num_groups + tl.minimum(column // group_size, num_groups - 1)
    weights = _numbers(stored, zeros, group, FORM) * _scales(scales, group)
    tl.store(result + row * num_inputs + column, weights.to(result.dtype.element_ty), mask=is_input)
