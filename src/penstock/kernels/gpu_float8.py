"""Products with FP8 weights on a GPU: of FP8 activations by cuBLASLt, or of activations as they are by Triton.

Suffixes: T rows (tokens), I input features, O output features, C blocks of input features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.device.capability import choices_of, gpu_capability
from penstock.kernels.stored_weight import FLOAT8, StoredWeight
from penstock.kernels.triton import triton_runs

# Sizes of a product that cuBLASLt takes are multiples of this.
_ALIGNMENT = 16
# Input features that a kernel reads at once, which have one scale.
_LEAST_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """FP8 weight with a scale for each output feature and block of `block_size` input features, the last one shorter.

    values_OI: float8_e4m3fn. scales_OC: float32.
    """

    values_OI: Tensor
    scales_OC: Tensor
    block_size: int

    @classmethod
    def of(cls, weight_OI: Tensor, scales_OC: Tensor, block_size: int) -> Float8Weight:
        """Restore the FP8 values of a dequantised weight, float32 [O, I]: rounding takes back the product's error."""
        scales_OC = scales_OC.to(weight_OI.device, torch.float32)
        values_OI = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn, device=weight_OI.device)
        weight = cls(values_OI, scales_OC, block_size)
        spread_OI = weight._spread()
        values_OI.copy_(weight_OI / torch.where(spread_OI == 0, 1.0, spread_OI))
        return weight

    @property
    def stored(self) -> StoredWeight:
        """The weight as Triton's products read it."""
        return StoredWeight(FLOAT8, self.values_OI, self.values_OI.shape[1], self.block_size, self.scales_OC)

    @property
    def has_row_scales(self) -> bool:
        """Whether each output feature has one scale."""
        return self.scales_OC.shape[1] == 1

    def dequantize(self) -> Tensor:
        """float32 [O, I]."""
        return self.values_OI.float() * self._spread()

    def _spread(self) -> Tensor:
        return self.scales_OC.repeat_interleave(self.block_size, 1)[:, : self.values_OI.shape[1]]


def takes_blocks(block_size: int, num_inputs: int) -> bool:
    """Whether the kernels support weights with scales of blocks of so many input features."""
    return block_size % _LEAST_BLOCK == 0 or block_size >= num_inputs


def float8_linear_reference(x_TI: Tensor, weight: Float8Weight, bias_O: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias in float32, rounded to x's dtype: the specification of products of plain activations."""
    result_TO = x_TI.float() @ weight.dequantize().T
    return (result_TO if bias_O is None else result_TO + bias_O.float()).to(x_TI.dtype)


def float8_linear(x_TI: Tensor, weight: Float8Weight, bias_O: Tensor | None, *, is_invariant: bool = False) -> Tensor:
    """x @ weight^T + bias in x's dtype, with the leading dimensions of x.

    cuBLASLt takes a weight with row scales, and x in bfloat16 or float16, whose rows are quantised to FP8 for it.
    Triton takes all others, and all where `is_invariant`: no row depends on another one.
    """
    shape = (*x_TI.shape[:-1], weight.values_OI.shape[0])
    if x_TI.is_meta:
        return x_TI.new_empty(shape)
    from penstock.kernels.triton.float8 import quantize_rows
    from penstock.kernels.triton.stored_weight import stored_linear

    flat_TI = x_TI.reshape(-1, x_TI.shape[-1]).contiguous()
    if len(flat_TI) and not is_invariant and _library_takes(flat_TI, weight):
        result_TO = _scaled_product(*quantize_rows(flat_TI), weight, bias_O, x_TI.dtype)
        return result_TO.view(shape)
    return stored_linear(flat_TI, weight.stored, bias_O, is_invariant=is_invariant).view(shape)


def _library_takes(x_TI: Tensor, weight: Float8Weight) -> bool:
    num_outputs, num_inputs = weight.values_OI.shape
    is_aligned = num_outputs % _ALIGNMENT == 0 and num_inputs % _ALIGNMENT == 0
    return x_TI.dtype in (torch.bfloat16, torch.float16) and weight.has_row_scales and is_aligned and triton_runs(x_TI)


def _scaled_product(
    values_TI: Tensor,
    scales_T1: Tensor,
    weight: Float8Weight,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Product of FP8 rows and weight in cuBLASLt, which scales rows itself where the GPU can, for bfloat16."""
    weight_IO, scales_1O = weight.values_OI.t(), weight.scales_OC.view(1, -1)
    if choices_of(gpu_capability()).scales_rows and dtype is torch.bfloat16:
        product = torch._scaled_mm(values_TI, weight_IO, scale_a=scales_T1, scale_b=scales_1O, out_dtype=dtype)
        return product if bias_O is None else product.add_(bias_O)
    one = scales_T1.new_ones(())
    product = torch._scaled_mm(values_TI, weight_IO, scale_a=one, scale_b=one, out_dtype=torch.float32)
    product = product.mul_(scales_T1).mul_(scales_1O)
    return (product if bias_O is None else product.add_(bias_O)).to(dtype)
