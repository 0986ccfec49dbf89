"""Products in bfloat16 arithmetic by additions one at a time, in the orders of AVX512-BF16 and of AMX."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.native import Bfloat16Layout

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def sum_in_order(x_TI: Tensor, weight_OI: Tensor, layout: Bfloat16Layout) -> Tensor:
    """x * weight^T, float32 [T, O], of an even number of inputs. x is rounded to bfloat16; the weight is bfloat16."""
    # Products are exact in float64. So are sums, if the exponents are close; their rounding to float32 is the only one.
    x_TI, wide_OI = flushed(x_TI.bfloat16().float()).double(), flushed(weight_OI.float()).double()
    return (sum_of_pairs if layout is Bfloat16Layout.PAIRS else sum_of_tiles)(x_TI, wide_OI)


def flushed(x: Tensor) -> Tensor:
    """Denormal numbers as zeros of their sign."""
    return torch.where(x.abs() < SMALLEST_NORMAL, torch.zeros_like(x).copysign(x), x)


def sum_of_pairs(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """vdpbf16ps, input by input: of each pair the second product first, every sum rounded to float32."""
    sum_TO = torch.zeros(len(x_TI), len(weight_OI))
    for pair in range(0, x_TI.shape[1], 2):
        for k in (pair + 1, pair):
            sum_TO = flushed((sum_TO.double() + torch.outer(x_TI[:, k], weight_OI[:, k])).float())
    return sum_TO


def sum_of_tiles(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """tdpbf16ps, 32 inputs at a time: the products of even inputs and those of odd ones, then both, then the sum."""
    sum_TO = torch.zeros(len(x_TI), len(weight_OI))
    for first in range(0, x_TI.shape[1], 32):
        halves = []
        for half in (0, 1):
            part_TO = torch.zeros_like(sum_TO)
            for k in range(first + half, min(first + 32, x_TI.shape[1]), 2):
                part_TO = flushed((part_TO.double() + torch.outer(x_TI[:, k], weight_OI[:, k])).float())
            halves.append(part_TO)
        sum_TO = flushed(sum_TO + flushed(halves[0] + halves[1]))
    return sum_TO
