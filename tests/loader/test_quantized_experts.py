"""Experts of quantised checkpoints have the weights of these, and are multiplied as they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.config import ModelConfig
from penstock.contract import RpcCall
from penstock.engine.planning.plan import plan_engine
from penstock.kernels.quantized import TorchQuantizedProducts
from penstock.layers.linear import LinearLayer, restore_weights, weights_size_bytes
from penstock.layers.quantization.method import PRODUCTS, QuantizedMethod
from penstock.models.causal_lm import CausalLM
from support.checkpoints import edit_config, load_config, oracle_logits, tiny_checkpoint
from support.engines import greedy, make_core, run
from support.plain_attention import sequence_logits, usual_difference
from support.quantized_checkpoints import (
    W8A8,
    Written,
    awq_layer,
    float_weights,
    gptq_layer,
    int8_layer,
    packed_layer,
    w4a16,
    write_quantized,
)
from support.ranks import contexts, run_ranks
from support.transformers_models import load

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FORMATS = {
    "gptq": (gptq_layer(32, desc_act=False), GPTQ),
    "gptq-desc-act": (gptq_layer(32, desc_act=True), {**GPTQ, "desc_act": True}),
    "awq": (awq_layer(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "w4a16": (packed_layer(32, symmetric=True), w4a16()),
    "w8a8": (int8_layer, W8A8),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64, "head_dim": 16},
    "mixtral": {},
    # Rows of query and key projections are in another order than in the checkpoint.
    "ernie4_5_moe": {"intermediate_size": 64, "moe_intermediate_size": 64},
}
_BLOCK, _LARGEST = 32, 448.0


def write(folder: Path, family: str, name: str) -> Written:
    quantize, config = FORMATS[name]
    return write_quantized(folder, quantize, config, family, **FAMILIES[family])


def oracle(folder: Path) -> Tensor:
    return oracle_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), TOKENS)


def logits_of(model: CausalLM) -> Tensor:
    return sequence_logits(model, [TOKENS])[0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_case_quick
def test_experts_keep_the_integers_of_the_checkpoint(family: str, name: str, tmp_path: Path) -> None:
    written = write(tmp_path, family, name)
    model = load(written.config)
    experts = [layer for path, layer in model.named_modules() if ".experts." in path and isinstance(layer, LinearLayer)]
    assert experts
    assert all(isinstance(layer.method, QuantizedMethod) for layer in experts)
    assert 0 < usual_difference(logits_of(model), oracle(written.float_folder)) < 0.06
    planned = plan_engine(str(written.config.folder), kv_cache_memory_bytes=1 << 22, dtype="float32")
    assert planned.stages[0].memory["weights"] == weights_size_bytes(model)
    restore_weights(model)
    expected = float_weights(written.float_folder)
    slots = {name: slot for name, slot in model.checkpoint_slots().items() if ".experts." in name}
    assert slots
    for tensor, slot in slots.items():
        assert torch.equal(slot.target, expected[tensor]), tensor


@pytest.mark.skipif(isinstance(PRODUCTS, TorchQuantizedProducts), reason="programs are made of the C++ kernels")
@pytest.mark.parametrize("name", ["awq", "w8a8"])
@pytest.mark.one_case_quick
def test_experts_run_within_programs(name: str, tmp_path: Path) -> None:
    written = write(tmp_path, "qwen3_moe", name)
    core = make_core(written.config.folder, dtype="float32")
    run(core, [TOKENS], greedy(3))
    (num_segments,) = core.collective_rpc(RpcCall(_num_segments))
    core.close()
    assert set(num_segments) == {1}


def _num_segments(worker: Any) -> list[int]:
    worker.execute_dummy_batch()
    programs = worker.runner.execution.programs._recorded.values()
    return [program.num_segments for program in programs if program is not None]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_case_quick
def test_two_ranks_share_the_experts(family: str, tmp_path: Path) -> None:
    config = write(tmp_path, family, "gptq").config
    expected = logits_of(load(config))
    ranks = [load(config, parallel=parallel) for parallel in contexts(2)]
    for found in run_ranks(2, lambda rank: logits_of(ranks[rank])):
        assert not isinstance(found, BaseException), found
        assert usual_difference(found, expected) < 0.03


def in_float8_blocks(folder: Path) -> tuple[ModelConfig, Path]:
    """Checkpoint of DeepSeek V3 whose projections are FP8 in blocks, and its float twin."""
    sizes = {"moe_intermediate_size": 64, "hidden_size": 64}
    tiny_checkpoint(folder / "float", "deepseek_v3", tie_word_embeddings=False, **sizes)
    floats, stored = load_file(folder / "float" / "model.safetensors"), {}
    for name, weight in floats.items():
        if "_proj" not in name or name.endswith("kv_b_proj.weight"):
            stored[name] = weight
            continue
        outputs, inputs = weight.shape
        padded = torch.zeros(-(-outputs // _BLOCK) * _BLOCK, -(-inputs // _BLOCK) * _BLOCK)
        padded[:outputs, :inputs] = weight
        scales = padded.view(-(-outputs // _BLOCK), _BLOCK, -1, _BLOCK).abs().amax((1, 3)) / _LARGEST
        whole = scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)[:outputs, :inputs]
        stored[name] = (weight / whole).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        floats[name] = stored[name].float() * whole
    save_file(floats, folder / "float" / "model.safetensors", {"format": "pt"})
    (folder / "fp8").mkdir()
    (folder / "fp8" / "config.json").write_text((folder / "float" / "config.json").read_text())
    save_file(stored, folder / "fp8" / "model.safetensors", {"format": "pt"})
    edit_config(folder / "fp8", quantization_config={"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]})
    return load_config(folder / "fp8"), folder / "float"


@pytest.mark.parametrize(("quantization", "tolerance"), [(None, 1e-5), ("int8", 0.06)])
def test_experts_in_float8_blocks_are_dequantised_or_rounded(
    quantization: str | None, tolerance: float, tmp_path: Path
) -> None:
    config, float_folder = in_float8_blocks(tmp_path)
    model = load(ModelConfig.load(str(config.folder), quantization=quantization))
    assert usual_difference(logits_of(model), oracle(float_folder)) < tolerance
