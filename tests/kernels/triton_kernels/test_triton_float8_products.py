"""Products with FP8 weights: in Triton against the dequantised weight, and the calls of cuBLASLt's."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from penstock.config import LoadConfig, ModelConfig
from penstock.device.capability import choices_of
from penstock.kernels import gpu_float8
from penstock.kernels.gpu_float8 import Float8Weight, float8_linear, float8_linear_reference
from penstock.kernels.triton.float8 import FLOAT8_MAX, quantize_rows
from penstock.layers.linear import LinearLayer
from penstock.layers.quantization.float8 import Float8Method
from penstock.loader.quantized.choose import choose_rounding
from support.checkpoints import edit_config, load_config, tiny_checkpoint
from support.plain_attention import sequence_logits
from support.transformers_models import load
from support.triton_device import DEVICE, needs_triton
from support.triton_interpreter import products_by_row

pytestmark = needs_triton


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def _weight(num_outputs: int, num_inputs: int, block_size: int) -> Float8Weight:
    """The largest value of a block need not be the largest FP8 number."""
    num_blocks = -(-num_inputs // block_size)
    scales_OC = _random(num_outputs, num_blocks).abs() / 100 + 0.001
    values_OI = (_random(num_outputs, num_inputs) * 40).to(torch.float8_e4m3fn)
    return Float8Weight(values_OI, scales_OC, block_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize("sizes", [(37, 150, 150), (32, 256, 128), (16, 104, 32)], ids=str)
def test_products_with_scales_of_blocks_and_of_outputs(
    sizes: tuple[int, int, int], num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_float8, "_library_takes", lambda *_: False)
    weight, x_TI, bias_O = _weight(*sizes), _random(num_rows, sizes[1], dtype=dtype), _random(sizes[0])
    for bias in (None, bias_O):
        found = float8_linear(x_TI, weight, bias)
        assert found.dtype is dtype
        expected = float8_linear_reference(x_TI, weight, bias)
        rtol = 1e-5 if dtype is torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


def test_a_row_has_the_same_bits_alone_and_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    products_by_row(monkeypatch)
    weight, x_TI = _weight(32, 128, 128), _random(100, 128, dtype=torch.bfloat16)
    whole = float8_linear(x_TI, weight, None, is_invariant=True)
    for first, last in ((0, 1), (99, 100), (20, 40)):
        assert torch.equal(float8_linear(x_TI[first:last], weight, None, is_invariant=True), whole[first:last])


def test_values_are_restored_from_the_dequantised_weight() -> None:
    weight = _weight(37, 96, 32)
    found = Float8Weight.of(weight.dequantize(), weight.scales_OC, 32)
    assert torch.equal(found.values_OI.view(torch.uint8), weight.values_OI.view(torch.uint8))


def test_rows_are_quantised_by_their_largest_value() -> None:
    x_TI = _random(3, 1100, dtype=torch.bfloat16)
    x_TI[1] = 0.0
    values_TI, scales_T1 = quantize_rows(x_TI)
    largest_T1 = x_TI.float().abs().amax(1, keepdim=True)
    torch.testing.assert_close(scales_T1, torch.where(largest_T1 > 0, largest_T1 / FLOAT8_MAX, 1.0))
    assert torch.equal(
        values_TI.view(torch.uint8), (x_TI.float() / scales_T1).to(torch.float8_e4m3fn).view(torch.uint8)
    )


@pytest.mark.parametrize(("capability", "num_scales"), [((8, 9), 1), ((9, 0), 16), ((12, 0), 1)])
def test_products_of_the_library_scale_rows_inside_or_afterwards(
    capability: tuple[int, int], num_scales: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for cuBLASLt notes the scales that it is given, and the layout of the operands."""
    calls: list[tuple[int, int]] = []

    def scaled(a_TI: Tensor, b_IO: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert a_TI.dtype is b_IO.dtype is torch.float8_e4m3fn
        assert a_TI.is_contiguous(), "rows of the left operand are contiguous"
        assert b_IO.t().is_contiguous(), "columns of the right operand are contiguous"
        calls.append((scale_a.numel(), scale_b.numel()))
        return ((a_TI.float() @ b_IO.float()) * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    monkeypatch.setattr(gpu_float8, "gpu_capability", lambda: capability)
    weight, x_TI, bias_O = _weight(32, 64, 64), _random(16, 64, dtype=torch.bfloat16), _random(32, dtype=torch.bfloat16)
    found = float8_linear(x_TI, weight, bias_O)
    assert calls == [(num_scales, 32 if num_scales > 1 else 1)]
    expected = float8_linear_reference(x_TI, weight, bias_O)
    # Rows are rounded to the three bits of an FP8 number.
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < 0.05


@pytest.mark.skipif(DEVICE != "cpu", reason="loads on the CPU, in place of a GPU")
@pytest.mark.parametrize("blocks", [None, (16, 32)])
def test_a_model_keeps_its_float8_values_and_has_the_logits_of_its_floats(
    blocks: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of a whole tensor differ between the shards of a fused layer."""
    tiny_checkpoint(tmp_path / "float", tie_word_embeddings=False, intermediate_size=104)
    floats, stored = load_file(tmp_path / "float" / "model.safetensors"), {}
    for key, weight_OI in floats.items():
        stored[key] = weight_OI
        if "_proj.weight" in key:
            rows, columns = blocks or weight_OI.shape
            shape = -(-weight_OI.shape[0] // rows), -(-weight_OI.shape[1] // columns)
            scale = torch.rand(shape) / 100 + 0.001
            spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            spread = spread[: weight_OI.shape[0], : weight_OI.shape[1]]
            stored[key] = (weight_OI / spread).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
            floats[key] = stored[key].float() * spread
            stored[f"{key}_scale_inv"] = scale if blocks else scale.reshape(())
    save_file(floats, tmp_path / "float" / "model.safetensors", {"format": "pt"})
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8" / "config.json").write_text((tmp_path / "float" / "config.json").read_text())
    save_file(stored, tmp_path / "fp8" / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "fp8", **({"weight_block_size": list(blocks)} if blocks else {})}
    config = edit_config(tmp_path / "fp8", quantization_config=settings)

    def on_gpu(model_config: ModelConfig, load_config: LoadConfig, kind: str) -> Any:
        return choose_rounding(model_config, load_config, "cuda")

    theirs = load(load_config(tmp_path / "float"))
    monkeypatch.setattr("penstock.loader.loader.choose_rounding", on_gpu)
    ours = load(config)
    methods = [layer.method for layer in ours.modules() if isinstance(layer, LinearLayer)]
    assert sum(isinstance(method, Float8Method) for method in methods) == len(methods) - 1  # but the output projection
    (found,), (expected,) = sequence_logits(ours, [[5, 9, 40, 22, 7]]), sequence_logits(theirs, [[5, 9, 40, 22, 7]])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_gpus_without_float8_dequantise_and_new_ones_take_the_row_before() -> None:
    assert not choices_of((8, 6)).has_float8
    assert choices_of((8, 9)).has_float8
    assert choices_of((10, 0)) is choices_of((9, 0))
    assert choices_of((6, 1)) is choices_of((7, 0))


_COMPILED = """
import sys
sys.path[:0] = {paths!r}
import pytest, torch
from triton.backends.compiler import GPUTarget
from support.triton_compile import LEAST_SHARED, compile_only
from support.stored_weights import empty_weight
from penstock.kernels.triton.float8 import quantize_rows
from penstock.kernels.triton.stored_weight import stored_linear
counts = compile_only(pytest.MonkeyPatch(), GPUTarget("cuda", 89, 32), most_shared=LEAST_SHARED)
weight = empty_weight("float8 blocks", 512, 512)
for dtype in (torch.bfloat16, torch.float32):
    for num_rows in (1, 24, 64):
        x = torch.empty(num_rows, 512, dtype=dtype)
        stored_linear(x, weight)
    quantize_rows(x)
print(counts)
"""


def test_the_kernels_compile_for_the_oldest_gpu_with_float8() -> None:
    """In a process without the interpreter; no GPU is needed."""
    script = _COMPILED.format(paths=[str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ast.literal_eval(done.stdout) == {"_product_kernel": 5, "_quantize_kernel": 2}
