"""MXFP4 weights: blocks of 32 values in E2M1 with a common scale in E8M0 (OCP Microscaling Formats 1.0).

Suffixes: O output features, I input features, B blocks of a row.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from penstock.errors import CheckpointError

BLOCKS, SCALES = "weight_blocks", "weight_scales"
BLOCK_SIZE = 32
# By code: sign, two bits of exponent, one of mantissa.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Exponent of the scale 1; the largest code is not a number.
_E8M0_BIAS, _E8M0_NAN = 127, 255


class Mxfp4Format:
    """MXFP4 tensors of a layer: `weight_blocks`, uint8 [O, B, 16], and `weight_scales`, uint8 [O, B].

    A byte holds two adjacent values, the first in its low bits.
    """

    name = "MXFP4"
    values, scales, skipped = (BLOCKS,), (SCALES,), ()
    dtypes = (torch.uint8,)

    def read(self, layer: str, blocks: Tensor, scales_OB: Tensor) -> Tensor:
        """Dequantise exactly: float32 [O, I]. Raises CheckpointError for shapes that do not fit together."""
        self.check(layer, blocks, scales_OB)
        return dequantize_mxfp4(blocks, scales_OB)

    @staticmethod
    def check(layer: str, blocks: Tensor, scales_OB: Tensor) -> None:
        """Raise CheckpointError for tensors that do not fit together."""
        if blocks.shape != (*scales_OB.shape, BLOCK_SIZE // 2) or scales_OB.dtype is not torch.uint8:
            raise CheckpointError(
                f"{layer}.{BLOCKS} is {list(blocks.shape)} and {layer}.{SCALES} {list(scales_OB.shape)} of "
                f"{scales_OB.dtype}. They must be [outputs, blocks, {BLOCK_SIZE // 2}] and [outputs, blocks] of uint8."
            )


def dequantize_mxfp4(blocks: Tensor, scales_OB: Tensor) -> Tensor:
    """Values of blocks [O, B, 16] and scales [O, B], uint8 both: float32 [O, 32 * B]. All are exact in bfloat16."""
    numbers = doubled(blocks).unflatten(-1, (-1, BLOCK_SIZE))
    weight: Tensor = numbers * factors(scales_OB).div_(2).unsqueeze(-1)
    return weight.flatten(-2)


def doubled(blocks: Tensor) -> Tensor:
    """Twice the E2M1 numbers of blocks [O, B, 16], uint8, without their scales: int8 [O, 32 * B]."""
    codes = blocks.flatten().view(torch.uint16).int()
    return _doubled_by_codes().to(blocks.device).index_select(0, codes).view(torch.int8).view(blocks.shape[0], -1)


@functools.cache
def _doubled_by_codes() -> Tensor:
    """Twice the numbers of four codes, by the 16 bits of these: int32, whose bytes are int8 numbers."""
    numbers = torch.tensor(E2M1_VALUES).mul_(2).to(torch.int8)
    for wider in (torch.int16, torch.int32):
        low, high = numbers.repeat(len(numbers)), numbers.repeat_interleave(len(numbers))
        numbers = torch.stack((low, high), dim=-1).view(wider).flatten()
    return numbers


def factors(scales_OB: Tensor) -> Tensor:
    """Powers of two that scales in E8M0 stand for: float32."""
    exponents = torch.arange(_E8M0_NAN + 1, device=scales_OB.device) - _E8M0_BIAS
    factors = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    factors[_E8M0_NAN] = float("nan")
    return factors.index_select(0, scales_OB.flatten().int()).view(scales_OB.shape)
