"""Products with int8, int4 and E2M1 weights in Triton against the dequantised weight in plain torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import support.triton_interpreter  # noqa: F401 - repairs the interpreter
from penstock.kernels.gpu_quantized import GpuQuantizedProducts, weight_only_linear_reference
from penstock.kernels.quantized import QuantizedWeight
from support.checkpoints import load_config, tiny_checkpoint
from support.plain_attention import sequence_logits
from support.quantized_checkpoints import (
    awq_layer,
    gptq_layer,
    torchao_config,
    torchao_int8_layer,
    write_quantized,
)
from support.stored_weights import as_on_gpu, quantized_as_on_gpu, random_e2m1
from support.transformers_models import load
from support.triton_device import DEVICE, needs_triton

pytestmark = needs_triton
PRODUCTS = GpuQuantizedProducts()
# Format, outputs, inputs, group size: whole tiles, parts of tiles, one group, groups that share a tile.
SIZES = [
    ("int8", 32, 256, 256),
    ("int8", 37, 72, 72),
    ("int8", 24, 200, 128),
    ("int8", 24, 200, 32),
    ("int4", 32, 256, 128),
    ("int4", 37, 296, 128),
    ("int4", 40, 320, 32),
    ("int4", 33, 512, 64),
    ("int4", 16, 96, 96),
    ("int4", 48, 600, 600),
    ("mxfp4", 33, 320, 32),
    ("e2m1", 16, 96, 16),
]


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def _weight(form: str, num_outputs: int, num_inputs: int, group_size: int) -> QuantizedWeight:
    weight_OI = _random(num_outputs, num_inputs)
    if form in ("int8", "int4"):
        return quantized_as_on_gpu(weight_OI, int(form[-1]), group_size)
    return random_e2m1(weight_OI, group_size, has_powers=form == "mxfp4")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_packed_weight_is_restored(sizes: tuple[str, int, int, int]) -> None:
    weight = _weight(*sizes)
    found = PRODUCTS.unpack(PRODUCTS.pack(weight), weight.shape)
    assert torch.equal(found.values_OI, weight.values_OI)
    assert torch.equal(found.scales_OG, weight.scales_OG)
    assert (found.minimums_OG is None) == (weight.minimums_OG is None)
    if found.minimums_OG is not None and weight.minimums_OG is not None:
        assert torch.equal(found.minimums_OG, weight.minimums_OG)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 3, 17, 40])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products(sizes: tuple[str, int, int, int], num_rows: int, dtype: torch.dtype) -> None:
    weight = _weight(*sizes)
    x_TI, bias_O = _random(num_rows, sizes[2], dtype=dtype), _random(sizes[1], dtype=dtype)
    for bias in (None, bias_O):
        found = PRODUCTS.linear(x_TI, PRODUCTS.pack(weight), weight.shape, bias)
        assert found.dtype is dtype
        expected = weight_only_linear_reference(x_TI, weight, bias)
        # Weights of groups that share a tile are rounded to the dtype.
        rtol = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


@pytest.mark.parametrize("sizes", [SIZES[1], SIZES[3], SIZES[5], SIZES[6], SIZES[10]], ids=str)
def test_products_of_many_rows_dequantise_parts_of_the_weight(
    sizes: tuple[str, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.kernels.gpu_quantized._MANY_ROWS", 4)
    monkeypatch.setattr("penstock.kernels.gpu_quantized._MAX_DEQUANTIZED", 10 * sizes[2])
    weight, x_TI, bias_O = _weight(*sizes), _random(9, sizes[2]), _random(sizes[1])
    found = PRODUCTS.linear(x_TI.view(3, 3, -1), PRODUCTS.pack(weight), weight.shape, bias_O)
    expected = weight_only_linear_reference(x_TI, weight, bias_O)
    torch.testing.assert_close(found.view(9, -1), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_are_those_of_the_dequantised_weight(sizes: tuple[str, int, int, int]) -> None:
    weight = _weight(*sizes)
    packed, ids_T = PRODUCTS.pack(weight), torch.tensor([3, 0, 15, 3], device=DEVICE)
    expected = weight.dequantize()[ids_T]
    torch.testing.assert_close(PRODUCTS.rows(ids_T, packed, weight.shape), expected)
    torch.testing.assert_close(PRODUCTS.rows(ids_T.int(), packed, weight.shape, packed), 2 * expected)


def test_a_step_without_rows() -> None:
    weight = _weight("int4", 32, 256, 128)
    found = PRODUCTS.linear(_random(0, 256), PRODUCTS.pack(weight), weight.shape, None)
    assert found.shape == (0, 32)


@pytest.mark.skipif(DEVICE != "cpu", reason="loads on the CPU, in place of a GPU")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["gptq", "reordered", "awq", "int8"])
def test_a_quantised_model_has_the_logits_of_its_dequantised_weights(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.layers.quantization.method.PRODUCTS", PRODUCTS)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    layers: dict[str, tuple[Any, dict[str, Any]]] = {
        "gptq": (gptq_layer(32, desc_act=False), {**gptq, "desc_act": False}),
        "reordered": (gptq_layer(32, desc_act=True), {**gptq, "desc_act": True}),
        "awq": (awq_layer(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
        "int8": (torchao_int8_layer, torchao_config("Int8WeightOnlyConfig", group_size=None)),
    }
    written = write_quantized(tmp_path, *layers[kind], tie_word_embeddings=tied)
    ours, theirs = (load(config) for config in (written.config, load_config(written.float_folder)))
    sequences = [[5, 9, 40, 22, 7], [3]]
    for found, expected in zip(sequence_logits(ours, sequences), sequence_logits(theirs, sequences), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(DEVICE != "cpu", reason="loads on the CPU, in place of a GPU")
@pytest.mark.parametrize("option", ["int8", "int4"])
def test_a_model_that_is_quantised_while_loading_is_near_its_float_weights(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an embedding that reads the packed rows of the tied output projection."""
    monkeypatch.setattr("penstock.layers.quantization.method.PRODUCTS", PRODUCTS)
    as_on_gpu(monkeypatch)
    config = tiny_checkpoint(tmp_path, tie_word_embeddings=True, hidden_size=64)
    ours, theirs = load(replace(config, quantization=option)), load(config)
    (found,), (expected,) = sequence_logits(ours, [[5, 9, 40, 22, 7]]), sequence_logits(theirs, [[5, 9, 40, 22, 7]])
    error = (torch.log_softmax(found, -1) - torch.log_softmax(expected, -1)).abs().mean()
    assert 0 < float(error) < (0.1 if option == "int8" else 0.5)


_COMPILED = """
import sys
import pytest, torch
sys.path[:0] = {paths!r}
from support.triton_compile import LEAST_SHARED, compile_only
from support.stored_weights import NAMES, empty_weight
from penstock.kernels.triton.stored_weight import dequantize, stored_linear
counts = compile_only(pytest.MonkeyPatch(), most_shared=LEAST_SHARED)
for name in NAMES:
    weight = empty_weight(name, 28672, 4096)
    for num_rows in (1, 24, 64):
        stored_linear(torch.empty(num_rows, 4096, dtype=torch.bfloat16), weight)
    if name == "int4 groups of 32":
        stored_linear(torch.empty(64, 4096), weight)
        dequantize(weight, torch.bfloat16)
print(counts)
"""


def test_the_kernels_compile_for_an_h100() -> None:
    """In a process without the interpreter; no GPU is needed."""
    script = _COMPILED.format(paths=[str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ast.literal_eval(done.stdout).keys() == {"_product_kernel", "_dequantize_kernel"}
