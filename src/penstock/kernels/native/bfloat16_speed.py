"""Speed of products in bfloat16 arithmetic beside those in float32.

Some processors have instructions for bfloat16 pairs that take four times as long as those of float32, such as Sapphire
Rapids, whose tiles are the fast ones: twice the products of an instruction in four times its time.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy as np

from penstock.kernels.native.bfloat16_layout import Bfloat16Layout
from penstock.kernels.native.operation_types import operation_types

_ROWS, _INPUTS, _OUTPUTS, _ROUNDS = 48, 512, 256, 8
_FLOAT32 = 0
# Of the time of products in float32; the ratios of processors are far from it on either side.
_MOST_TIME = 0.8


@cache
def pairs_pay(module: Any, instruction_set: int) -> bool:
    """Whether products of pairs are faster than those of float32. It takes a millisecond of one thread."""
    linear = operation_types(module)["linear"].number
    x, out = np.zeros((_ROWS, _INPUTS), np.float32), np.zeros((_ROWS, _OUTPUTS), np.float32)
    weight = np.zeros((_OUTPUTS, _INPUTS), np.float32)
    for array in (x, out, weight):
        array.fill(0)  # its pages are there then
    arguments = x.ctypes.data, _INPUTS, out.ctypes.data, _OUTPUTS, weight.ctypes.data, None, _INPUTS, _OUTPUTS

    def seconds(weight_type: int) -> float:
        began = time.perf_counter()
        module.operation(linear, instruction_set, _ROWS, 1, *arguments, weight_type)
        return time.perf_counter() - began

    times = [(seconds(_FLOAT32), seconds(Bfloat16Layout.PAIRS.value[0])) for _ in range(_ROUNDS)]
    in_float32, of_pairs = (min(each) for each in zip(*times, strict=True))
    return bool(of_pairs < _MOST_TIME * in_float32)
