"""Weights in the formats of a GPU's kernels: random ones, and empty ones for compilations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.gpu_float8 import Float8Weight
from penstock.kernels.gpu_quantized import GpuQuantizedProducts, stored_weight
from penstock.kernels.quantized import QuantizedShape, QuantizedWeight
from penstock.kernels.stored_weight import FLOAT8, StoredWeight
from penstock.layers.quantization import quantize

_E2M1_VALUES = (-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12)
_SHAPES = {
    "int8": (8, 0, False, 4),
    "int8 groups of 128": (8, 128, False, 4),
    "int8 groups of 32": (8, 32, False, 4),
    "int4 groups of 128": (4, 128, True, 4),
    "int4 groups of 32": (4, 32, True, 4),
    "mxfp4": (4, 32, False, 1),
}
NAMES = ("plain", *_SHAPES, "float8 rows", "float8 blocks")


def as_on_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let weights on the CPU be quantised as on a GPU, where int4 has zero points and int8 one scale per output."""
    patch.setattr(quantize, "is_on_cpu", lambda _: False)


def quantized_as_on_gpu(weight_OI: Tensor, bits: int, group_size: int | None = None) -> QuantizedWeight:
    with pytest.MonkeyPatch.context() as patch:
        as_on_gpu(patch)
        return (quantize.quantize_int8 if bits == 8 else quantize.quantize_int4)(weight_OI, group_size)


def random_e2m1(weight_OI: Tensor, group_size: int, *, has_powers: bool) -> QuantizedWeight:
    """E2M1 weight whose codes follow from the order of random numbers, with a group of zeros.

    has_powers: scales are powers of two, of different signs of the exponent.
    """
    num_outputs, num_inputs = weight_OI.shape
    table = torch.tensor(_E2M1_VALUES, dtype=torch.float32, device=weight_OI.device)
    values_OI = table[(weight_OI * 100).long() % len(_E2M1_VALUES)]
    values_OI[-1, :group_size] = 0
    shape = num_outputs, -(-num_inputs // group_size)
    scales_OG = 1 / 64 + torch.arange(shape[0] * shape[1], device=weight_OI.device).view(shape) % 7 / 128
    if has_powers:
        scales_OG = scales_OG.log2().floor().exp2()
    spread_OI = scales_OG.repeat_interleave(group_size, 1)[:, :num_inputs]
    weight = quantize.round_to_e2m1(values_OI * spread_OI, scales_OG, group_size)
    assert weight.shape.scale_bytes == (1 if has_powers else 4)
    return weight


def random_stored(name: str, weight_OI: Tensor) -> tuple[StoredWeight, Tensor]:
    """A weight of a format in `NAMES`, and its values in float32. weight_OI: random numbers."""
    num_inputs = weight_OI.shape[1]
    if name == "plain":
        return StoredWeight.plain(weight_OI), weight_OI
    if name in ("float8 rows", "float8 blocks"):
        group_size = num_inputs if name == "float8 rows" else 32
        scales_OC = torch.rand(len(weight_OI), -(-num_inputs // group_size), device=weight_OI.device) + 0.01
        weight = Float8Weight((weight_OI.float() * 2).to(torch.float8_e4m3fn), scales_OC, group_size)
        return weight.stored, weight.dequantize()
    bits, group_size, _, scale_bytes = _SHAPES[name]
    group_size, weight_OI = group_size or num_inputs, weight_OI.float()
    if scale_bytes == 1:
        quantized = random_e2m1(weight_OI, group_size, has_powers=True)
    else:
        quantized = quantized_as_on_gpu(weight_OI, bits, group_size)
    return stored_weight(GpuQuantizedProducts().pack(quantized), quantized.shape), quantized.dequantize()


def empty_weight(name: str, num_outputs: int, num_inputs: int) -> StoredWeight:
    """Uninitialised weight of a format in `NAMES`."""
    if name == "plain":
        return StoredWeight.plain(torch.empty(num_outputs, num_inputs, dtype=torch.bfloat16))
    if name in ("float8 rows", "float8 blocks"):
        group_size = num_inputs if name == "float8 rows" else 128
        scales = torch.empty(num_outputs, -(-num_inputs // group_size))
        values = torch.empty(num_outputs, num_inputs, dtype=torch.float8_e4m3fn)
        return StoredWeight(FLOAT8, values, num_inputs, group_size, scales)
    bits, group_size, has_minimums, scale_bytes = _SHAPES[name]
    shape = QuantizedShape(bits, num_outputs, num_inputs, group_size or num_inputs, has_minimums, scale_bytes)
    row_bytes = num_inputs if bits == 8 else -(-num_inputs // 256) * 128
    num_bytes = row_bytes + shape.num_groups * ((4 if scale_bytes == 4 else 1) + has_minimums)
    return stored_weight(torch.empty(num_outputs * num_bytes, dtype=torch.uint8), shape)
