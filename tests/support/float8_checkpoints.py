"""Checkpoints with FP8 weights, and their float twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config import ModelConfig
from support.checkpoints import edit_config, load_config, tiny_checkpoint
from support.quantized_checkpoints import compressed_config

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


def write_float8(folder: Path, name: str, family: str = "llama", **sizes: Any) -> tuple[ModelConfig, ModelConfig]:
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
