"""Products of the C++ kernels whose weights are in no cache, as in a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.native import NATIVE, Bfloat16Layout
from penstock.kernels.native.quantized import native_quantized_products
from penstock.kernels.quantized import QuantizedShape, QuantizedWeight

# bfloat16 weights in bfloat16 arithmetic, and in the order of AMX, emulated on a processor without it.
BFLOAT16_ARITHMETIC = "bfloat16-arithmetic"
BY_TILES = "bfloat16-by-tiles"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    BFLOAT16_ARITHMETIC: torch.bfloat16,
    BY_TILES: torch.bfloat16,
}


class Product:
    """One weight, in as many copies as `most_bytes` hold, so that none is in a cache, and the time of a pass over them.

    dtype: of `DTYPES`, "int8" or "int4" in groups of 32, or "torch" for torch's own float32 product.
    """

    def __init__(self, inputs: int, outputs: int, dtype: str, most_bytes: int) -> None:
        self.inputs = inputs
        multiply, pack, self.num_bytes = _multiplication(inputs, outputs, dtype)
        self._multiply: Callable[[Tensor, Tensor], Tensor] = multiply
        self._weights = [pack() for _ in range(max(1, -(-most_bytes // self.num_bytes)))]

    def seconds(self, x_TI: Tensor, budget_s: float) -> float:
        """Median of one product: a pass over all copies, or so many as fit into the budget."""
        self._multiply(x_TI, self._weights[0])
        times = []
        for weight in self._weights:
            begin = time.perf_counter()
            self._multiply(x_TI, weight)
            times.append(time.perf_counter() - begin)
            if sum(times) > budget_s:
                break
        return statistics.median(times)


def _int8_weight(inputs: int, outputs: int) -> QuantizedWeight:
    shape = QuantizedShape(8, outputs, inputs, 32)
    values_OI = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    return QuantizedWeight(shape, values_OI, torch.rand(outputs, shape.num_groups) + 0.01, None)


def _int4_weight(inputs: int, outputs: int) -> QuantizedWeight:
    shape = QuantizedShape(4, outputs, inputs, 32, has_minimums=True)
    values_OI = torch.randint(0, 16, (outputs, inputs), dtype=torch.int8)
    scales_OG = torch.rand(outputs, shape.num_groups) + 0.01
    return QuantizedWeight(shape, values_OI, scales_OG, -8 * scales_OG)


_QUANTIZED = {"int8": _int8_weight, "int4": _int4_weight}


def _multiplication(
    inputs: int, outputs: int, dtype: str
) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], Tensor], int]:
    """A product of rows with a packed weight, a maker of packed copies, and the bytes of one."""
    assert NATIVE is not None
    native = NATIVE
    if dtype in _QUANTIZED:
        products = native_quantized_products()
        assert products is not None
        quantized = _QUANTIZED[dtype](inputs, outputs)
        shape = quantized.shape
        packed = products.pack(quantized)
        return (
            lambda x_TI, weight: products.linear(x_TI, weight, shape, None),
            packed.clone,
            packed.numel() * packed.element_size(),
        )
    weight_OI = torch.empty(outputs, inputs).uniform_(-1, 1).to(torch.float32 if dtype == "torch" else DTYPES[dtype])
    num_bytes = weight_OI.numel() * weight_OI.element_size()
    if dtype == "torch":
        return F.linear, weight_OI.clone, num_bytes
    layout = {BFLOAT16_ARITHMETIC: native.bfloat16_layout, BY_TILES: Bfloat16Layout.TILES}.get(dtype)
    return (
        lambda x_TI, weight: native.linear(x_TI, weight, outputs, None),
        lambda: native.pack_weight(weight_OI, bfloat16=layout),
        num_bytes,
    )
