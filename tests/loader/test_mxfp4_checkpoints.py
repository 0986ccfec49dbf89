"""Checkpoints with MXFP4 experts give the model of the floats that these stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config import ModelConfig
from penstock.engine.planning.plan import plan_engine
from penstock.errors import CheckpointError, UnsupportedFeature
from penstock.kernels.quantized import TorchQuantizedProducts
from penstock.layers.linear import LinearLayer, restore_weights, weights_size_bytes
from penstock.layers.quantization.method import PRODUCTS, QuantizedMethod
from penstock.loader.quantized.grid import Grid
from penstock.loader.quantized.mxfp4 import dequantize_mxfp4, doubled, factors
from support.mxfp4_checkpoints import write_mxfp4
from support.plain_attention import sequence_logits
from support.ranks import contexts, run_ranks
from support.transformers_models import load

in_place = pytest.mark.skipif(
    isinstance(PRODUCTS, TorchQuantizedProducts), reason="without the C++ kernels MXFP4 is dequantised"
)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def by_definition(code: int, scale: int) -> float:
    """E2M1: a sign, two bits of exponent with bias 1, one of mantissa, and subnormals. E8M0: an exponent."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return sign * value * 2.0 ** (scale - 127)


def test_every_code_and_scale_has_the_value_of_its_definition() -> None:
    scales = torch.arange(5, 251, dtype=torch.uint8)
    codes = torch.arange(32, dtype=torch.uint8) % 16
    blocks = (codes[::2] | codes[1::2] << 4).expand(len(scales), 1, 16)
    found = dequantize_mxfp4(blocks, scales[:, None])
    expected = [[by_definition(code, scale) for code in codes.tolist()] for scale in scales.tolist()]
    assert torch.equal(found.double(), torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(found.bfloat16().float(), found), "bfloat16 holds all of them"
    assert dequantize_mxfp4(blocks[:1], torch.tensor([[255]], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_float_twin(tmp_path: Path, dtype: torch.dtype) -> None:
    stored, floats = write_mxfp4(tmp_path)
    models = load(ModelConfig.load(str(stored.folder), quantization="none"), dtype), load(floats, dtype)
    (found,), (expected,) = (sequence_logits(model, [TOKENS]) for model in models)
    assert torch.equal(found, expected)


def is_stored(layer: LinearLayer) -> bool:
    method = layer.method
    return isinstance(method, QuantizedMethod) and "floats of 4 bits (E2M1) in groups of 32" in method.description


@in_place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_multiply_by_the_stored_codes(tmp_path: Path, dtype: torch.dtype) -> None:
    stored, floats = write_mxfp4(tmp_path)
    model, twin = load(stored, dtype), load(floats, dtype)
    (found,), (expected,) = (sequence_logits(one, [TOKENS]) for one in (model, twin))
    assert 0 < (found - expected).norm() < 0.03 * expected.norm()
    stored_layers = [layer for layer in model.modules() if isinstance(layer, LinearLayer) and is_stored(layer)]
    assert len(stored_layers) == 2 * 2 * 5, "two products of five experts in two layers"
    restore_weights(model)
    restore_weights(twin)
    for name, slot in model.checkpoint_slots().items():
        assert torch.equal(slot.target.float(), twin.checkpoint_slots()[name].target.float()), name


@in_place
def test_packed_bytes_are_those_of_the_dequantised_weight() -> None:
    blocks = torch.randint(0, 256, (70, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (70, 3), dtype=torch.uint8)
    blocks[5], blocks[9] = 0, 0x88
    grid = Grid(4, 32, factors(scales) / 2)
    weights = grid.round(doubled(blocks)), grid.round(dequantize_mxfp4(blocks, scales))
    assert torch.equal(*(PRODUCTS.pack(weight) for weight in weights))


@in_place
@pytest.mark.parametrize("scale", [0, 1, 2, 254, 255])
def test_the_smallest_and_largest_scales_are_restored(scale: int) -> None:
    codes = torch.arange(32, dtype=torch.uint8) % 16
    blocks = (codes[::2] | codes[1::2] << 4).expand(40, 2, 16)
    scales = torch.full((40, 2), scale, dtype=torch.uint8)
    weight = Grid(4, 32, factors(scales) / 2).round(doubled(blocks))
    assert weight.shape.scale_bytes == (1 if 2 <= scale < 255 else 4), "a byte holds normal powers of two"
    restored = PRODUCTS.unpack(PRODUCTS.pack(weight), weight.shape).dequantize()
    torch.testing.assert_close(restored, dequantize_mxfp4(blocks, scales), rtol=0, atol=0, equal_nan=True)


@in_place
def test_the_plan_counts_the_stored_codes(tmp_path: Path) -> None:
    stored, _ = write_mxfp4(tmp_path, hidden_size=256, intermediate_size=256)
    planned = plan_engine(str(stored.folder), kv_cache_memory_bytes=1 << 22, dtype="float32").weights
    model = load(stored)
    assert planned == weights_size_bytes(model)
    floats = load(ModelConfig.load(str(stored.folder), quantization="none"), torch.bfloat16)
    assert weights_size_bytes(model) < 0.5 * weights_size_bytes(floats)


@in_place
def test_two_ranks_share_the_stored_codes(tmp_path: Path) -> None:
    stored, _ = write_mxfp4(tmp_path)
    (expected,) = sequence_logits(load(stored), [TOKENS])
    ranks = [load(stored, parallel=parallel) for parallel in contexts(2)]
    for found in run_ranks(2, lambda rank: sequence_logits(ranks[rank], [TOKENS])):
        assert not isinstance(found, BaseException), found
        assert (found[0] - expected).norm() < 0.02 * expected.norm()


@in_place
def test_ranks_that_would_split_blocks_are_refused(tmp_path: Path) -> None:
    stored, _ = write_mxfp4(tmp_path, intermediate_size=96)
    with pytest.raises(UnsupportedFeature, match=r"down_proj"):
        load(stored, parallel=contexts(2)[0])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_can_be_rounded_again(tmp_path: Path, quantization: str) -> None:
    logits = [
        sequence_logits(load(ModelConfig.load(str(config.folder), quantization=quantization)), [TOKENS])[0]
        for config in write_mxfp4(tmp_path)
    ]
    assert torch.equal(*logits)


def test_blocks_without_scales_are_refused(tmp_path: Path) -> None:
    config, _ = write_mxfp4(tmp_path)
    path = config.folder / "model.safetensors"
    tensors = load_file(path)
    scales = tensors.pop("model.layers.0.mlp.experts.down_proj_scales")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"MXFP4 layers are missing: \S*experts.0.down_proj.weight_scales"):
        load(config)
    tensors["model.layers.0.mlp.experts.down_proj_scales"] = scales[..., :1].contiguous()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"weight_blocks is \[64, 2, 16\].*weight_scales \[64, 1\]"):
        load(config)
