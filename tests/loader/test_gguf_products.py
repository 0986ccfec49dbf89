"""Products are computed from the blocks of GGUF files, with the integers, scales and minimums that these have."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.attention import NO_CONTEXT
from penstock.config import LoadConfig, ModelConfig
from penstock.engine.planning.plan import plan_engine
from penstock.kernels.quantized import TorchQuantizedProducts, quantize_rows
from penstock.layers.linear import LinearLayer, PackedMethod, restore_weights, weights_size_bytes
from penstock.layers.quantization.method import PRODUCTS, QuantizedMethod
from penstock.loader.gguf.grids import BLOCK_TYPES, alike
from penstock.loader.gguf.tensors import GgufWeights
from penstock.loader.loader import load_model
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import tiny_model
from support.gguf_files import FAMILIES, finish, quantised, write_gguf
from support.plain_attention import sequence_logits

pytestmark = pytest.mark.skipif(
    isinstance(PRODUCTS, TorchQuantizedProducts), reason="without the C++ kernels GGUF files are dequantised"
)
_TYPES = [Type(number) for number in BLOCK_TYPES]
_TOKENS = [5, 17, 3, 88, 41, 9, 64, 23, 7, 11]
_SIZES = {"intermediate_size": 128}
_SIZES_OF = {
    "gpt2": {"n_inner": 128},
    "gemma2": {**_SIZES, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma3": {**_SIZES, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 6},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def _blocks(kind: Type, rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return quantised(values, kind, seed)


def _file(path: Path, tensors: dict[str, tuple[np.ndarray[Any, Any], Type]]) -> GgufWeights:
    writer = gguf.GGUFWriter(path, "qwen3")
    for name, (blocks, kind) in tensors.items():
        writer.add_tensor(name, blocks, raw_dtype=kind)
    finish(writer)
    weights = GgufWeights.find(path.parent)
    assert weights is not None
    return weights


def _rounded(x_TI: Tensor) -> Tensor:
    """Activations as the products round them, float64."""
    values_TI, scales_TG = quantize_rows(x_TI)
    return values_TI.double() * scales_TG.double().repeat_interleave(32, dim=1)[:, : x_TI.shape[1]]


def _method(weight_OI: Tensor, method: QuantizedMethod) -> LinearLayer:
    layer = LinearLayer(weight_OI.shape[1], weight_OI.shape[0], bias=False)
    layer.take_weight(weight_OI)
    layer.method = method
    method.process_weights_after_loading(layer)
    return layer


def _check_products(weight_OI: Tensor, layer: LinearLayer) -> None:
    """Compare with the dequantised weight times the rounded activations."""
    assert isinstance(layer.method, PackedMethod)
    assert layer.method.packed_OI is not None
    restored_OI = layer.method.unpack(layer.method.packed_OI, layer.output_size)
    torch.testing.assert_close(restored_OI, weight_OI, rtol=1e-6, atol=1e-6 * float(weight_OI.abs().max()))
    for num_rows in (1, 5, 40):
        x_TI = torch.randn(num_rows, weight_OI.shape[1])
        exact_TO = _rounded(x_TI) @ weight_OI.double().T
        tolerance = 2e-6 * float(_rounded(x_TI).abs().sum(1).max() * weight_OI.abs().max())
        torch.testing.assert_close(layer(x_TI, NO_CONTEXT).double(), exact_TO, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", _TYPES, ids=lambda kind: kind.name)
def test_products_are_those_of_the_dequantised_blocks_and_rounded_activations(kind, tmp_path):
    blocks = _blocks(kind, 40, 512)
    weights = _file(tmp_path / "model.gguf", {"blk.0.ffn_down.weight": (blocks, kind)})
    grid = weights.grid("model.layers.0.mlp.down_proj.weight")
    assert grid is not None
    weight_OI = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())
    _check_products(weight_OI, _method(weight_OI.clone(), QuantizedMethod(grid.grid.round)))


@pytest.mark.parametrize(
    "kinds", [(Type.Q4_K, Type.Q6_K), (Type.Q4_0, Type.Q8_0), (Type.Q4_1, Type.Q5_K)], ids=lambda kinds: kinds[0].name
)
def test_tensors_of_several_types_are_computed_together(kinds, tmp_path):
    stored = {f"blk.0.{name}.weight": (_blocks(kind, 20, 256), kind) for name, kind in zip("qk", kinds, strict=True)}
    weights = _file(tmp_path / "model.gguf", stored)
    grids = alike([grid for name in stored if (grid := weights.grid(name)) is not None])
    assert grids is not None
    for (blocks, kind), grid in zip(stored.values(), grids, strict=True):
        weight_OI = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())
        _check_products(weight_OI, _method(weight_OI.clone(), QuantizedMethod(grid.round)))
    assert len({(grid.bits, grid.group_size, grid.minimums_OG is None) for grid in grids}) == 1


def test_types_without_a_common_format_have_none(tmp_path):
    kinds = {"a": Type.Q8_0, "b": Type.Q4_1}
    weights = _file(tmp_path / "model.gguf", {name: (_blocks(kind, 20, 256), kind) for name, kind in kinds.items()})
    assert alike([grid for name in kinds if (grid := weights.grid(name)) is not None]) is None


def _load(path: Path, quantization: str | None = None) -> CausalLM:
    config = ModelConfig.load(path, quantization=quantization)
    return load_model(config, LoadConfig(), ParallelState(), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_each_architecture_keeps_its_weights(family, tmp_path):
    model = tiny_model(family, **_SIZES_OF.get(family, _SIZES))
    path = write_gguf(model, family, tmp_path / "tiny.gguf", Type.Q4_1)
    plain, computed = _load(path, "none"), _load(path)
    expected, logits = (sequence_logits(one, [_TOKENS])[0] for one in (plain, computed))
    assert 0 < (logits - expected).norm() < 0.03 * expected.norm()
    linear = [module for module in computed.modules() if isinstance(module, LinearLayer)]
    assert all(isinstance(module.method, QuantizedMethod) for module in linear)
    restore_weights(plain)
    restore_weights(computed)
    for name, slot in computed.checkpoint_slots().items():
        torch.testing.assert_close(slot.target, plain.checkpoint_slots()[name].target, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", _TYPES, ids=lambda kind: kind.name)
def test_the_plan_counts_blocks_in_the_layout_of_the_products(kind, tmp_path):
    model = tiny_model("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    path = write_gguf(model, "llama", tmp_path / "tiny.gguf", kind)
    loaded = weights_size_bytes(_load(path))
    planned = plan_engine(path, kv_cache_memory_bytes=1 << 22, dtype="float32").stages[0].memory["weights"]
    assert planned == loaded
    bits = BLOCK_TYPES[kind].bits
    assert loaded < (0.4 if bits == 4 else 0.6) * weights_size_bytes(_load(path, "none"))


def test_tensors_without_products_of_their_blocks_are_named_in_the_log(tmp_path, caplog):
    model = tiny_model("llama", **_SIZES, tie_word_embeddings=False)
    path = write_gguf(model, "llama", tmp_path / "tiny.gguf", Type.Q8_0)
    with caplog.at_level(logging.INFO, logger="penstock"):
        _load(path)
    assert "Quantized weights: products of the GGUF file's own blocks" in caplog.text
    assert "1 quantised tensors are not computed from their blocks" in caplog.text
    assert "model.embed_tokens.weight" in caplog.text


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow)],
    ids=["one worker", "two workers"],
)
def test_tokens_are_generated_from_blocks(options, tmp_path):
    path = write_gguf(tiny_model("llama", **_SIZES), "llama", tmp_path / "tiny.gguf", Type.Q8_0)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    tokens = []
    for quantization in (None, "none"):
        with LLM(path, quantization=quantization, kv_cache_memory_bytes=1 << 22, **options) as llm:
            (output,) = llm.generate([{"prompt_token_ids": _TOKENS}], params)
        tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]
