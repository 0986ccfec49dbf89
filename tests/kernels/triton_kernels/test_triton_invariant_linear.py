"""Batch-invariant products in Triton against plain torch: rows alone and in a batch have the same bits."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from penstock.attention import NO_CONTEXT
from penstock.kernels.gpu_quantized import GpuQuantizedProducts
from penstock.kernels.linear import batch_invariant_head_products, batch_invariant_linear
from penstock.layers.linear import LinearLayer
from penstock.layers.quantization.quantize import quantize_int8, round_to_int4
from support.triton_device import DEVICE, needs_triton
from support.triton_interpreter import products_by_row

pytestmark = needs_triton


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 70])
def test_products_with_sizes_that_no_tile_divides(num_rows: int, dtype: torch.dtype) -> None:
    x_TI, weight_OI, bias_O = _random(num_rows, 150, dtype=dtype), _random(37, 150, dtype=dtype), _random(37)
    found = batch_invariant_linear(x_TI, weight_OI, bias_O)
    expected = F.linear(x_TI.float(), weight_OI.float(), bias_O)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_any_others(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    products_by_row(monkeypatch)
    x_TI, weight_OI = _random(140, 96, dtype=dtype), _random(40, 96, dtype=dtype)
    whole = batch_invariant_linear(x_TI, weight_OI)
    for first, last in ((0, 1), (139, 140), (17, 25), (60, 130)):
        assert torch.equal(batch_invariant_linear(x_TI[first:last], weight_OI), whole[first:last])


def test_a_row_of_heads_has_the_same_bits_alone_and_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of latent attention, with a weight whose outputs are its columns."""
    products_by_row(monkeypatch)
    x_THI, weight_HIO = _random(50, 3, 40), _random(3, 40, 24)
    whole = batch_invariant_head_products(x_THI, weight_HIO.transpose(1, 2))
    torch.testing.assert_close(whole, torch.einsum("thi,hio->tho", x_THI, weight_HIO))
    assert torch.equal(batch_invariant_head_products(x_THI[41:42], weight_HIO.transpose(1, 2)), whole[41:42])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_of_a_quantised_product_has_the_same_bits_alone_and_in_a_batch(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 rows are more than those for which the weight is dequantised to memory otherwise."""
    products_by_row(monkeypatch)
    weight_OI = _random(33, 128)
    scales_OG = weight_OI.view(33, 4, 32).abs().amax(-1) / 7
    weight = quantize_int8(weight_OI, 128) if bits == 8 else round_to_int4(weight_OI, scales_OG, -8 * scales_OG, 32)
    products = GpuQuantizedProducts(is_invariant=True)
    packed, x_TI = products.pack(weight), _random(300, 128)
    whole = products.linear(x_TI, packed, weight.shape, None)
    for first, last in ((0, 1), (299, 300), (20, 40)):
        assert torch.equal(products.linear(x_TI[first:last], packed, weight.shape, None), whole[first:last])


def test_a_linear_layer_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    products_by_row(monkeypatch)
    layer = LinearLayer(64, 24, bias=False)
    layer.weight.data = _random(24, 64)
    layer.batch_invariant = True
    x_TI = _random(5, 64)
    assert torch.equal(layer(x_TI, NO_CONTEXT), batch_invariant_linear(x_TI, layer.weight))


_COMPILED = """
import sys
sys.path[:0] = {paths!r}
import pytest, torch
from support.triton_compile import LEAST_SHARED, compile_only
from penstock.kernels.triton.invariant_linear import invariant_linear
counts = compile_only(pytest.MonkeyPatch(), most_shared=LEAST_SHARED)
for dtype in (torch.bfloat16, torch.float32):
    for num_outputs, num_inputs in ((32768, 4096), (8192, 2048), (1024, 2048)):
        weight = torch.empty(num_outputs, num_inputs, dtype=dtype)
        for num_rows in (1, 37, 2048):
            invariant_linear(torch.empty(num_rows, num_inputs, dtype=dtype), weight)
print(counts)
"""


def test_the_kernel_compiles_for_any_gpu_once_per_tiling() -> None:
    """In a process without the interpreter; no GPU is needed. The number of rows changes no tiling."""
    script = _COMPILED.format(paths=[str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ast.literal_eval(done.stdout) == {"_product_kernel": 4}
