"""Checkpoints with FP8 weights give the model of the floats that these stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config import ModelConfig
from penstock.errors import CheckpointError
from support.checkpoints import edit_config, load_config, tiny_checkpoint
from support.engines import greedy, make_core, random_prompts, run
from support.plain_attention import sequence_logits
from support.quantized_checkpoints import compressed_config
from support.transformers_models import load

_LARGEST = 448.0
BLOCK = (16, 32)
# Scales of a weight [O, I], as they are stored.
Scales = Callable[[Tensor], Tensor]


def of_tensor(weight_OI: Tensor) -> Tensor:
    return (weight_OI.abs().amax() / _LARGEST).reshape(())


def of_outputs(weight_OI: Tensor) -> Tensor:
    return weight_OI.abs().amax(1, keepdim=True) / _LARGEST


def of_blocks(weight_OI: Tensor) -> Tensor:
    outputs, inputs = (-(-size // block) for size, block in zip(weight_OI.shape, BLOCK, strict=True))
    padded = torch.zeros(outputs * BLOCK[0], inputs * BLOCK[1])
    padded[: weight_OI.shape[0], : weight_OI.shape[1]] = weight_OI
    return padded.view(outputs, BLOCK[0], inputs, BLOCK[1]).abs().amax((1, 3)) / _LARGEST


def spread(scale: Tensor, weight_OI: Tensor) -> Tensor:
    if scale.dim() < 2 or scale.shape[1] == 1 < scale.shape[0]:
        return scale
    whole = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return whole[: weight_OI.shape[0], : weight_OI.shape[1]]


def compressed(strategy: str, **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **fields}
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return compressed_config("float-quantized", weights, activations)


FORMATS: dict[str, tuple[Scales, str, dict[str, Any]]] = {
    "fp8 tensor": (of_tensor, "weight_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 blocks": (of_blocks, "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": list(BLOCK)}),
    "compressed tensor": (of_tensor, "weight_scale", compressed("tensor")),
    "compressed channel": (of_outputs, "weight_scale", compressed("channel")),
    "compressed blocks": (of_blocks, "weight_scale", compressed("block", block_structure=list(BLOCK))),
}


def write(folder: Path, name: str, family: str = "llama", **sizes: Any) -> tuple[ModelConfig, ModelConfig]:
    """Configurations of an FP8 checkpoint and of its float twin. Sizes that no block divides."""
    scales_of, kind, config = FORMATS[name]
    tiny_checkpoint(folder / "float", family, tie_word_embeddings=False, intermediate_size=104, **sizes)
    floats, stored = load_file(folder / "float" / "model.safetensors"), {}
    for key, weight in floats.items():
        if "_proj.weight" not in key:
            stored[key] = weight
            continue
        scale = scales_of(weight)
        stored[key] = (weight / spread(scale, weight)).to(torch.float8_e4m3fn)
        floats[key] = stored[key].float() * spread(scale, weight)
        layer = key.removesuffix("weight")
        stored[layer + kind] = scale
        if config.get("activation_scheme") == "static":
            stored[layer + "input_scale"] = torch.ones(())
    save_file(floats, folder / "float" / "model.safetensors", {"format": "pt"})
    (folder / "fp8").mkdir()
    (folder / "fp8" / "config.json").write_text((folder / "float" / "config.json").read_text())
    save_file(stored, folder / "fp8" / "model.safetensors", {"format": "pt"})
    return edit_config(folder / "fp8", quantization_config=config), load_config(folder / "float")


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_float_twin(tmp_path: Path, name: str) -> None:
    ours, twin = write(tmp_path, name)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    (found,), (expected,) = (sequence_logits(load(config), [tokens]) for config in (ours, twin))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_an_engine_generates_the_tokens_of_the_float_twin(tmp_path: Path, family: str) -> None:
    results = []
    sizes = {} if family == "llama" else {"kv_lora_rank": 48}
    for config in write(tmp_path, "fp8 blocks", family, **sizes):
        core = make_core(config.folder, dtype="float32")
        results.append(run(core, random_prompts((5, 21), 97), greedy(12, logprobs=1)))
        core.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("missing", ["weight_scale", "weight"])
def test_a_weight_without_its_scale_is_refused(tmp_path: Path, missing: str) -> None:
    config, _ = write(tmp_path, "fp8 tensor")
    path = config.folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"model.layers.0.self_attn.q_proj.{missing}"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"FP8 layers are missing: model.layers.0.self_attn.q_proj.weight"):
        load(config)


def test_scales_of_another_block_size_are_refused(tmp_path: Path) -> None:
    config, _ = write(tmp_path, "fp8 blocks")
    config = edit_config(config.folder, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]})
    message = r"weight_scale is \[4, 4\]. The weight, \[64, 104\], needs \[2, 4\] scales, for blocks of 32 x 32"
    with pytest.raises(CheckpointError, match=message):
        load(config)
